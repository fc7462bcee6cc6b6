"""Children arm themselves by `torchport.arm`."""

import pytest
from fakes.plain_script import PlainScript

import torchport
from torchport.errors import BadValueError

POOL = """
import multiprocessing
import torchport
from {package} import {name}

def answer(_):
    from up import m
    return m.answer()

if __name__ == "__main__":
    import up.m
    context = multiprocessing.get_context("{method}")
    {make}
        print(list(pool.map(answer, range(2))))
"""
EXECUTOR = "with ProcessPoolExecutor(1, mp_context=context, initializer=torchport.arm) as pool:"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_pool_are_armed_by_the_initializer(tmp_path, method):
    here = PlainScript(tmp_path)
    make = "with context.Pool(1, initializer=torchport.arm) as pool:"
    here.write("script.py", POOL.format(method=method, make=make, package="os", name="path"))
    done = here.run("script.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "['patched', 'patched']\n", "")


def test_workers_of_an_executor_are_armed_by_the_initializer(tmp_path):
    here = PlainScript(tmp_path)
    package = "concurrent.futures"
    here.write("script.py", POOL.format(method="spawn", make=EXECUTOR, package=package, name="ProcessPoolExecutor"))
    done = here.run("script.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "['patched', 'patched']\n", "")


def test_a_worker_of_a_data_loader_is_armed_by_its_init_function(tmp_path):
    here = PlainScript(tmp_path)
    here.write(
        "script.py",
        """
        import torch, torchport

        class Answers(torch.utils.data.Dataset):
            def __len__(self):
                return 2

            def __getitem__(self, number):
                from up import m
                return m.answer()

        if __name__ == "__main__":
            import up.m
            context = dict(num_workers=1, multiprocessing_context="spawn", worker_init_fn=torchport.arm)
            print(next(iter(torch.utils.data.DataLoader(Answers(), batch_size=2, **context))))
        """,
    )
    done = here.run("script.py")
    assert (done.returncode, done.stdout) == (0, "['patched', 'patched']\n"), done.stderr


def test_python_in_a_subprocess_is_armed_by_its_first_line(tmp_path):
    here = PlainScript(tmp_path)
    here.write("child.py", "import torchport\ntorchport.arm()\nfrom up.m import answer\nprint(answer())\n")
    here.write("plain.py", "from up.m import answer\nprint(answer())\n")
    here.write(
        "script.py",
        """
        import subprocess, sys, up.m
        for name in ("child.py", "plain.py"):
            subprocess.run([sys.executable, name], check=True)
        """,
    )
    done = here.run("script.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "patched\nupstream\n", "")


def test_a_child_has_the_mesh_and_the_devices_of_its_parent(tmp_path):
    here = PlainScript(tmp_path)
    here.write(
        "child.py",
        """
        import torchport
        torchport.arm()
        import jax, up.m
        from torchport.own_code import sessions
        print(sessions[-1].choice.mesh, sessions[-1].choice.attention, len(jax.devices()))
        """,
    )
    here.write("script.py", "import subprocess, sys, up.m\nsubprocess.run([sys.executable, 'child.py'], check=True)\n")
    done = here.run("script.py", flags=("--mesh", "tp=2", "--machine", "cpu:2", "--attention", "plain"))
    assert (done.returncode, done.stdout) == (0, "{'tp': 2} plain 2\n"), done.stderr


def test_a_process_that_nobody_told_is_refused(monkeypatch):
    monkeypatch.delenv("TORCHPORT_APPLIED", raising=False)
    with pytest.raises(BadValueError, match="No process above this one has patches in force"):
        torchport.arm(0)

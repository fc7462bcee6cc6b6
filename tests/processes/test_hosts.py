"""Several processes as one: they find each other on loopback, make what one process makes, and end together."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
import types

import pytest
from fakes.artefacts import frames_of, same_frames
from fakes.plain_pack import PlainPack
from safetensors.torch import load_file

from torchport import save
from torchport.config import machine
from torchport.errors import BadValueError, MachineError
from torchport.processes import hosts
from torchport.processes.hosts import Cluster, cluster_of
from torchport.run.path import run
from torchport.task import Request, devices

SMALL = ("height=64", "width=96", "frames=5", "steps=2", "strategy=ulysses", "mesh={dp: 2, sp: 4}")
PROMPT = "A cat walks past a red sign"
PATIENCE = 300
"""Seconds after which a process is taken to hang; a busy machine needs a fifth of it."""


@contextlib.contextmanager
def started(folder, root, *commands):
    """Starts Python processes that find each other; gives them and their logs, and leaves none behind."""
    path = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        running, logs = [], []
        for number, command in enumerate(commands):
            logs.append(folder / f"process{number}.log")
            flags = ["--coordinator", address, "--processes", str(len(commands)), "--process", str(number)]
            log = stack.enter_context(logs[-1].open("w"))
            running.append(
                subprocess.Popen(
                    [sys.executable, *command, *flags],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                    cwd=root,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        try:
            yield running, logs
        finally:
            for process in running:
                process.kill()
                process.wait()


def finished(folder, root, *commands):
    """Returns the exit codes and the output of processes that find each other, all at their end."""
    with started(folder, root, *commands) as (running, logs):
        codes = [process.wait(PATIENCE) for process in running]
    return codes, [log.read_text() for log in logs]


def job(*flags, overrides=SMALL):
    """The command line of the demo, small."""
    sets = [word for override in overrides for word in ("--set", override)]
    return ["run", "--model", "hunyuan", "--config", "configs/demo.yaml", *sets, *map(str, flags)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, root):
    """The folder of a run in one process of eight devices."""
    folder = tmp_path_factory.mktemp("alone")
    run(Request("hunyuan", "configs/demo.yaml", PROMPT, out=folder, overrides=SMALL, paths=(str(root),)))
    return folder


def difference(ours, reference, artefact, name):
    """Returns max|a - b| / max|b|, of a reference whose size makes that mean something."""
    a, b = (load_file(folder / f"{artefact}.safetensors")[name].double() for folder in (ours, reference))
    assert a.shape == b.shape and 0.5 <= b.abs().max() <= 20
    return ((a - b).abs().max() / b.abs().max()).item()


def test_two_processes_make_what_one_makes(alone, tmp_path, root):
    """The whole path on two processes of four devices: dp crosses them. The second one's folder is never made."""
    outs = [tmp_path / "out", tmp_path / "unused"]
    codes, said = finished(
        tmp_path, root, *(["-m", "torchport", *job("--prompt", PROMPT, "--out", out)] for out in outs)
    )
    assert codes == [0, 0], "\n".join(said)
    assert difference(outs[0], alone, "denoise", "latents") <= 1e-5
    assert same_frames(frames_of(outs[0]), frames_of(alone))
    assert {file.name for file in outs[0].iterdir()} == {file.name for file in alone.iterdir()}
    assert not outs[1].exists()
    assert str(outs[0] / "video.mp4") in said[0] and "video.mp4" not in said[1] and "compile" not in said[1]


@pytest.mark.slow
def test_two_processes_encode_on_the_devices_what_the_host_encodes(alone, tmp_path, root):
    flags = ("--stage", "encode", "--prompt", PROMPT, "--out", tmp_path / "out")
    command = ["-m", "torchport", *job(*flags, overrides=(*SMALL, "encode=devices"))]
    codes, said = finished(tmp_path, root, command, command)
    assert codes == [0, 0], "\n".join(said)
    assert difference(tmp_path / "out", alone, "encode", "prompt_embeds") <= 1e-5


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """The pack of a plain network; its modules are forgotten afterwards."""
    pack = PlainPack(tmp_path, monkeypatch)
    yield pack
    pack.close()


def test_a_plain_network_over_two_processes_makes_what_one_makes(pack, tmp_path, monkeypatch, root):
    """The same path with a network of two layers: its tensor-parallel axis crosses the processes."""
    one, two, unused = (tmp_path / name for name in ("one", "two", "unused"))
    run(Request("plain", "small", "A cat", out=one, paths=(str(pack.root),)))
    words = ["-m", "torchport", "run", "--model", "plain", "--config", "small", "--prompt", "A cat"]
    words += ["--path", str(pack.root)]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    codes, said = finished(tmp_path, root, *([*words, "--out", str(out)] for out in (two, unused)))
    assert codes == [0, 0], "\n".join(said)
    assert difference(two, one, "denoise", "latents") <= 1e-5
    assert not unused.exists()


# Slow: two processes make two videos of the demo. Quick tests hold the parts: tests/run/test_series.py makes series,
# and the test above joins two processes.
# pytest -m slow tests/processes/test_hosts.py -k file_of_prompts
@pytest.mark.slow
def test_two_processes_make_a_file_of_prompts_together(alone, tmp_path, root):
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": "{PROMPT}"}}\n{{"prompt": "A dog", "seed": 7}}\n')
    flags = ("--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "out")
    codes, said = finished(tmp_path, root, *[["-m", "torchport", *job(*flags)]] * 2)
    assert codes == [0, 0], "\n".join(said)
    folders = sorted(folder for folder in (tmp_path / "out").iterdir() if folder.is_dir())
    assert len(folders) == 2
    assert difference(folders[0], alone, "denoise", "latents") <= 1e-5
    assert same_frames(frames_of(folders[0]), frames_of(alone))
    assert not same_frames(frames_of(folders[1]), frames_of(alone))


def test_an_axis_that_crosses_processes_makes_the_same_latents(alone, tmp_path, root):
    """With the order of devices changed, so that all of a block's exchanges are between processes."""
    crossing = (
        "from torchport import __main__; from torchport.shard import grid; "
        "grid.order = lambda *_: [0, 1, 4, 5, 2, 3, 6, 7]; __main__.main()"
    )
    flags = ("--stage", "denoise", "--inputs", alone, "--out", tmp_path / "out")
    codes, said = finished(tmp_path, root, *[["-c", crossing, *job(*flags)]] * 2)
    assert codes == [0, 0], "\n".join(said)
    assert difference(tmp_path / "out", alone, "denoise", "latents") <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_stops_all_after_the_same_step(tmp_path, root, told):
    long = (*SMALL[:3], "steps=500", *SMALL[4:])
    out = tmp_path / "out"
    command = ["-m", "torchport", *job("--prompt", PROMPT, "--out", out, overrides=long)]
    with started(tmp_path, root, command, command) as (running, logs):
        _wait_for(logs[0], "compile transformer: ")
        running[told].send_signal(signal.SIGTERM)
        codes = [process.wait(PATIENCE) for process in running]
    assert codes == [130, 130]
    said = [log.read_text() for log in logs]
    done = save.read_manifest(out / "denoise.partial.safetensors").done
    assert f"error[TP701] SIGTERM: Stopped after step {done} of 500" in said[told]
    assert f"error[TP701] another process: Stopped after step {done} of 500" in said[1 - told]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("when", ["load transformer", "compile transformer: "])
def test_a_process_that_is_killed_ends_the_others_with_the_way_to_go_on(tmp_path, root, killed, when):
    """While it loads, and in a step."""
    long = (*SMALL[:3], "steps=500", *SMALL[4:])
    command = ["-m", "torchport", *job("--prompt", PROMPT, "--out", tmp_path / "out", overrides=long)]
    with started(tmp_path, root, command, command) as (running, logs):
        _wait_for(logs[0], when)
        running[killed].kill()
        assert running[1 - killed].wait(PATIENCE) == 75
    assert logs[1 - killed].read_text().splitlines()[-1] == (
        f"error[TP504] process {killed} of 2: It was killed, or its host is lost; what was finished is in "
        f"{tmp_path / 'out'}. Start all processes again with the same command and --out {tmp_path / 'out'}."
    )


def _wait_for(log, text):
    deadline = time.monotonic() + PATIENCE
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


CHILD = """if True:
    import os, sys, threading, time
    import jax
    from torchport.processes import hosts
    from torchport.errors import MeshError
    jax.config.update("jax_platforms", "cpu")
    cluster = hosts.cluster_of(False, sys.argv[2], int(sys.argv[4]), int(sys.argv[6]))
    hosts.SILENCE = 5

    def mine(number):
        assert hosts.process() == 0, "only the first makes it"
        return number

    def refused():
        raise MeshError("a.yaml:7", "It is so", "Make it otherwise", axis="dp")

    def dying(number):
        if hosts.process() == number:
            os.kill(os.getpid(), 9)

    def program(number):
        import numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec
        mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
        where = NamedSharding(mesh, PartitionSpec("x"))
        array = jax.make_array_from_callback((8,), where, lambda index: np.ones(8)[index])
        long = jax.jit(lambda a: jax.lax.fori_loop(0, 10**8, lambda _, b: b / b.sum(), a), out_shardings=where)
        compiled = long.lower(array).compile()
        threading.Timer(1, dying, [number]).start()
        compiled(array).block_until_ready()

    def stopped(number):
        import ctypes, signal
        from torchport.processes.stopping import Stopping
        with Stopping().listening():
            if hosts.process() == number:
                for delay in (1, 2):
                    threading.Timer(delay, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
            mutex, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)

    def talk():
        import torch
        assert (hosts.processes(), hosts.is_first()) == (2, hosts.process() == 0)
        assert [hosts.from_first(lambda: mine(number)) for number in range(3)] == [0, 1, 2]
        made = torch.randn(1_000_000, generator=torch.Generator().manual_seed(1))
        made = {"large": made, "half": made[:7].bfloat16(), "none": made[:0], "part": made[::2]}
        value, tensors = hosts.pair_from_first(lambda: (mine({"a": [1]}), made))
        assert value == {"a": [1]} and all(torch.equal(tensors[name], made[name]) for name in made)
        # What the first process does alone asks nobody.
        assert hosts.from_first(lambda: [hosts.from_first(lambda: mine(5)), hosts.any_process(True)]) == [5, True]
        assert hosts.any_process(hosts.process() == 1) and not hosts.any_process(False)
        try:
            hosts.from_first(refused)
        except MeshError as error:
            print("refused:", error, error.axis, error.on_every_process, flush=True)
        hosts.check_same({"frames": 5, "prompt": "a"})
        hosts.check_same({"frames": 5 + hosts.process(), "prompt": "a"})

    def main():
        with hosts.joined(cluster):
            if sys.argv[0] == "-c":
                CASE
"""


def children(folder, root, case):
    """Runs a case in two processes, through the command line's own way of reporting errors."""
    code = CHILD.replace("CASE", case) + "\n    import types\n    from torchport import __main__"
    code += "\n    __main__.cli = types.SimpleNamespace(name='torchport', main=lambda **_: main())"
    return finished(folder, root, *[["-c", code + "\n    __main__.main()"]] * 2)


def test_the_first_process_tells_the_others_what_it_makes_and_what_it_refuses(tmp_path, root):
    """And processes that were not started alike refuse to go on."""
    codes, said = children(tmp_path, root, "talk()")
    for text in said:
        assert "refused: a.yaml:7: It is so. Make it otherwise. dp True" in text
    assert codes == [2, 2], "\n".join(said)
    assert "error[TP501] process 1: Its frames is 6, and that of process 0 is 5. Start every process with" in "".join(
        said
    )


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_ends_the_others_with_its_error(tmp_path, root, failing):
    """The other one waits for it, as it would inside a program."""
    codes, said = children(tmp_path, root, f"refused() if hosts.process() == {failing} else time.sleep(1000)")
    assert codes == [2, 2], "\n".join(said)
    assert "error[TP401] a.yaml:7: It is so. Make it otherwise." in said[failing]
    assert f"process {failing} of 2 failed, and this one ends: error[TP401] a.yaml:7" in said[1 - failing]


LOST = "It was killed, or its host is lost. Start all processes again with the same command."


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("case", ["dying() or hosts.any_process(False)", "program()"], ids=["exchange", "program"])
def test_a_process_that_is_killed_is_named_by_the_others(tmp_path, root, killed, case):
    """While they wait for what it says, and in a program together with it."""
    codes, said = children(tmp_path, root, case.replace("()", f"({killed})"))
    assert codes[killed] == -signal.SIGKILL and codes[1 - killed] == 75, "\n".join(said)
    assert said[1 - killed].splitlines()[-1] == f"error[TP504] process {killed} of 2: {LOST}"


def test_a_program_that_fails_by_itself_is_no_death(tmp_path, root):
    """Its own error is told, once it is known that all live."""
    codes, said = children(tmp_path, root, "raise RuntimeError('by itself') if hosts.is_first() else time.sleep(1000)")
    assert codes == [1, 1], "\n".join(said)
    assert "RuntimeError: by itself" in said[0]
    assert said[1].splitlines()[-1] == "process 0 of 2 failed, and this one ends: RuntimeError: by itself"


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_second_ctrl_c_to_one_ends_all(tmp_path, root, stopped):
    """Both wait in C, as in a program."""
    codes, said = children(tmp_path, root, f"stopped({stopped})")
    last = "Stopped at once; what was being written is not kept."
    assert codes == [130, 130], "\n".join(said)
    assert said[stopped].splitlines()[-1] == last
    assert said[1 - stopped].splitlines()[-1] == f"process {stopped} of 2 failed, and this one ends: {last}"


def refusal(*flags):
    with pytest.raises(BadValueError) as caught:
        cluster_of(*flags)
    return str(caught.value)


def test_the_flags_name_a_cluster_or_are_refused():
    assert cluster_of(False, None, None, None) is None
    assert cluster_of(True, None, None, None) == Cluster()
    assert cluster_of(False, "[::1]:8476", 2, 1) == Cluster("[::1]:8476", 2, 1)
    assert refusal(True, None, 2, None) == (
        "--distributed: --processes is given too. Leave one out: --distributed takes all from the cluster."
    )
    assert refusal(False, "a:1", None, None) == (
        "--coordinator: It is given without --processes and --process. "
        "Give all three, or --distributed alone on a cluster that JAX knows."
    )
    for address in ("a", "a:", ":1", "a:0", "a:65536", "a:b"):
        assert refusal(False, address, 2, 0) == (
            f"--coordinator {address}: It is no host and port. Name those of the first process, such as 10.0.0.1:8476."
        )
    assert refusal(False, "a:1", 2, 2) == "--process 2: There are 2 processes. It must be 0 to 1."


def test_where_there_is_no_cluster_the_reader_is_told_to_name_it(monkeypatch):
    def initialize(*args, **options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    with pytest.raises(MachineError) as caught, hosts.joined(Cluster()):
        pass
    assert str(caught.value) == (
        "--distributed: The processes of the run do not find each other: coordinator_address should be defined. "
        "Name it: --coordinator HOST:PORT --processes N --process I."
    )


def test_the_original_runs_on_one_host(request_for):
    with pytest.raises(BadValueError, match="--backend original: It runs in PyTorch, which knows nothing of other"):
        run(request_for(), Cluster("127.0.0.1:1", 2, 0))


def test_one_process_talks_to_itself():
    assert hosts.from_first(lambda: 3) == 3 and hosts.any_process(True) and not hosts.any_process(False)
    hosts.check_same({"a": 1})
    with hosts.joined(None):
        assert hosts.processes() == 1 and hosts.is_first()


def test_a_machines_devices_are_shared_out_among_processes(monkeypatch):
    monkeypatch.setattr(hosts, "processes", lambda: 3)
    with pytest.raises(MachineError) as caught:
        devices.prepare(machine.Machine("cpu:8", "cpu", 8))
    assert str(caught.value) == (
        "machine cpu:8: Its devices cannot be shared out evenly among 3 processes. Name a multiple of the number of "
        "processes."
    )
    need = devices.Need(4, {"transformer": 1}, 0, "tiny")
    devices.require(machine.Machine("cpu:8", "cpu", 8), dataclasses.replace(need, devices=8), "x")
    with pytest.raises(MachineError, match="this machine has 8 devices in 3 processes"):
        devices.require(machine.Machine("cpu:4", "cpu", 4), need, "x")


@pytest.mark.parametrize("ago", [0, hosts.SILENCE + 1])
def test_a_first_process_that_hangs_is_named_though_its_host_takes_connections(monkeypatch, ago):
    said, dialled, connect = [], [], socket.create_connection
    monkeypatch.setattr(hosts, "_leave", lambda code, text: said.append((code, text)))
    monkeypatch.setattr(socket, "create_connection", lambda *to, **how: dialled.append(to) or connect(*to, **how))
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        own = hosts.Watch(types.SimpleNamespace(num_processes=2, process_id=1, coordinator_address=address))
        own.answered -= ago
        own._on_abort()
    lost = "error[TP504] process 0 of 2: It was killed, or its host is lost. Start all processes again with the same "
    assert said == ([(75, f"{lost}command.")] if ago else [])
    assert len(dialled) == (0 if ago else 1), "a first process that is silent already is not dialled"

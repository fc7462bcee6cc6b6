"""Ctrl-C: the step in progress is finished and saved, and the same command goes on to the same bits."""

import dataclasses
import errno
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch
from fakes.plants import plant

from torchport import save
from torchport.config import checkout
from torchport.errors import (
    ArtefactBrokenError,
    ArtefactForeignError,
    BadValueError,
    NotFiniteError,
    OutputError,
    StoppedError,
    TorchportError,
)
from torchport.files import atomic
from torchport.load import checkpoint
from torchport.processes.git import Revision
from torchport.processes.stopping import Stopping
from torchport.progress import log
from torchport.run import resume
from torchport.run.path import run
from torchport.stages.outputs import not_finite
from torchport.task import Execution, accept

PARTIAL = {"denoise.partial.safetensors"}


def names(folder):
    """The names of the files in a folder."""
    return {file.name for file in folder.iterdir()}


def bits(folder, name="denoise"):
    """The checksum of an artefact's tensors."""
    return save.read_manifest(save.file_of(folder, name)).sha256


@pytest.fixture(scope="module")
def encoded(tmp_path_factory, root):
    """Embeddings that every test here denoises, made once."""
    from torchport.task import Request

    folder = tmp_path_factory.mktemp("encoded")
    small = ("height=64", "width=64", "frames=5", "steps=3")
    run(
        Request(
            "hunyuan",
            "configs/demo.yaml",
            "A cat",
            "dark",
            out=folder,
            stage="encode",
            backend="original",
            overrides=small,
            paths=(str(root),),
        )
    )
    return folder


@pytest.fixture
def denoise(request_for, encoded):
    """Requests the denoising of those embeddings."""
    return lambda **changes: request_for(stage="denoise", prompt=None, inputs=encoded, **changes)


@pytest.fixture
def interrupted(monkeypatch):
    """Sends this process SIGINT when a step begins, as Ctrl-C does."""
    track = resume.track

    def at(step, times=1):
        def sending(items, what, unit, total=None, done=0):
            for number, item in enumerate(track(items, what, unit, total, done), done + 1):
                if number == step and what == "denoise":
                    for _ in range(times):
                        os.kill(os.getpid(), signal.SIGINT)
                yield item

        monkeypatch.setattr(resume, "track", sending)

    return at


@pytest.fixture(scope="module")
def whole(tmp_path_factory, encoded, root):
    """The latents of a run that nobody stopped, by backend."""
    from torchport.task import Request

    def make(backend):
        folder = tmp_path_factory.mktemp(backend)
        small = ("height=64", "width=64", "frames=5", "steps=3")
        request = Request("hunyuan", "configs/demo.yaml", out=folder, inputs=encoded, stage="denoise", backend=backend)
        run(dataclasses.replace(request, overrides=small, paths=(str(root),)))
        return bits(folder)

    made = {}
    return lambda backend: made.setdefault(backend, None) or made.update({backend: make(backend)}) or made[backend]


@pytest.mark.parametrize("backend", ["original", "torchax"])
def test_a_stopped_run_goes_on_to_the_same_bits(denoise, interrupted, whole, tmp_path, backend, monkeypatch):
    out = tmp_path / "out"
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context():
        interrupted(2)
        with pytest.raises(StoppedError) as stopped:
            run(denoise(backend=backend))
    assert str(stopped.value) == (
        f"Ctrl-C: Stopped after step 2 of 3; what was finished is in {out}. "
        f"Go on with the same command and --out {out}."
    )
    assert stopped.value.exit_code == 130 and names(out) == PARTIAL
    assert signal.getsignal(signal.SIGINT) is before, "the handler of before is back"
    monkeypatch.undo()
    summary = run(denoise(backend=backend))
    assert summary.steps == 1, "only the last step was taken"
    assert bits(out) == whole(backend)
    assert not PARTIAL & names(out), "the unfinished latents are gone"


ONE_STEP = ("height=64", "width=64", "frames=5", "steps=1")


def test_a_stop_during_the_last_step_lets_the_stage_finish(denoise, interrupted, tmp_path):
    interrupted(1)
    assert run(denoise(overrides=ONE_STEP)).steps == 1
    assert names(tmp_path / "out") == {"denoise.json", "denoise.safetensors", "manifest.json"}


def test_a_stop_during_the_last_step_of_all_stages_comes_before_the_next_stage(request_for, interrupted, tmp_path):
    interrupted(1)
    with pytest.raises(StoppedError, match="Stopped before 'decode'; what was finished is in"):
        run(request_for(overrides=ONE_STEP))
    left = {"encode.json", "encode.safetensors", "denoise.json", "denoise.safetensors", resume.UNFINISHED}
    assert names(tmp_path / "out") == left

    made = (tmp_path / "out" / "denoise.safetensors").stat().st_mtime_ns
    summary = run(request_for(overrides=ONE_STEP))
    assert summary.steps == 0 and summary.video.is_file(), "the same command does only what was left to do"
    assert (tmp_path / "out" / "denoise.safetensors").stat().st_mtime_ns == made
    assert resume.UNFINISHED not in names(tmp_path / "out")


def test_another_job_in_the_folder_of_a_stopped_one_begins_anew(request_for, interrupted, tmp_path):
    interrupted(1)
    with pytest.raises(StoppedError):
        run(request_for(overrides=ONE_STEP))
    made = bits(tmp_path / "out")
    with pytest.raises(StoppedError, match="Stopped before 'decode'"):  # after its own only step
        run(request_for(overrides=ONE_STEP, seed=5))
    assert bits(tmp_path / "out") != made


def test_a_stop_between_two_tiles_comes_before_the_next(request_for, monkeypatch, tmp_path):
    """Decoding a large video takes minutes; Ctrl-C does not wait for all of its tiles."""
    tiled = ("height=320", "width=320", "frames=1", "steps=1", "vae_tiling=true")
    run(request_for(stage="encode", overrides=tiled))
    run(request_for(stage="denoise", prompt=None, overrides=tiled))
    called = []

    def once(self, **inputs):
        called.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        with torch.no_grad():
            return self.module(**inputs)

    monkeypatch.setattr("torchport.compile.eager.Eager.__call__", once)
    with pytest.raises(StoppedError, match="Stopped in 'decode'"):
        run(request_for(stage="decode", prompt=None, overrides=tiled))
    assert len(called) == 1 and "decode.json" not in names(tmp_path / "out")


def test_a_run_that_is_killed_goes_on_after_the_last_saving(denoise, whole, tmp_path, monkeypatch):
    """No Ctrl-C but a power cut: what `save_every` left is where it goes on."""
    track = resume.track

    def dying(items, what, unit, total=None, done=0):
        for number, item in enumerate(track(items, what, unit, total, done), done + 1):
            if number == 3:
                raise MemoryError
            yield item

    request = denoise(overrides=("height=64", "width=64", "frames=5", "steps=3", "save_every=2"))
    with monkeypatch.context() as context:
        context.setattr(resume, "track", dying)
        with pytest.raises(MemoryError):
            run(request)
    assert names(tmp_path / "out") == PARTIAL
    assert run(request).steps == 1 and bits(tmp_path / "out") == whole("original")


def test_a_second_ctrl_c_stops_at_once(denoise, interrupted, tmp_path):
    interrupted(1, times=2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(denoise())
    assert not (tmp_path / "out").exists(), "nothing was finished, and no empty folder is left"
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_nothing_is_handled_and_nothing_fails():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with Stopping().listening() as stopping:
            seen.append((stopping.cause, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [("", True)]


def test_sigterm_asks_for_a_stop_as_ctrl_c_does(request_for):
    """Schedulers and preempted machines send it."""
    before, task = signal.getsignal(signal.SIGTERM), accept(request_for())
    with Stopping().listening() as stopping:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StoppedError, match=r"^SIGTERM: Stopped after step 2 of 3; what was finished is in "):
            stopping.check(task.folder, "after step 2 of 3")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_hangup_asks_for_a_stop_however_often_it_comes(request_for):
    """A shell sends it on, beside the terminal's own."""
    outside = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    before, task = signal.getsignal(signal.SIGHUP), accept(request_for())
    with Stopping().listening() as stopping:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(StoppedError, match=r"^SIGHUP: Stopped after step 2 of 3; what was finished is in "):
            stopping.check(task.folder, "after step 2 of 3")
    assert signal.signal(signal.SIGHUP, outside) is before


def test_a_hangup_that_is_ignored_stays_ignored():
    """Started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping().listening() as stopping:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stopping.is_requested()
    finally:
        assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN


LISTENING = """if True:
    import ctypes, fcntl, pathlib, signal, sys, termios, time
    from torchport.processes.stopping import Stopping

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a child of nohup, as a CI may start one, would ignore it

    class Swallowing:
        def __del__(self):
            time.sleep(60)

    def swallowed():
        while True:
            Swallowing()

    def in_c():
        mutex, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)

    def until_asked():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        sys.stderr.write("ready\\n")
        while not stopping.is_requested():
            time.sleep(0.01)
        time.sleep(0.1)
        sys.stderr.write("saving\\n")
        pathlib.Path(sys.argv[1]).write_text(stopping.cause)

    with Stopping().listening() as stopping:
        sys.stderr.write("listening\\n")
        CASE()
"""


def read_until(stream, text):
    """Returns what a process has written, up to a text; a process that writes nothing more fails."""
    read = b""
    while text not in read:
        piece = os.read(stream, 1000)
        assert piece, read
        read += piece
    return read


@pytest.mark.parametrize("case", ["swallowed", "in_c"])
def test_a_second_ctrl_c_ends_a_process_whatever_it_is_at(root, case):
    """In a callback that swallows every exception, as JAX's of the garbage collector does, or in C for good."""
    command = [sys.executable, "-c", LISTENING.replace("CASE", case)]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE) as process:
        try:
            read_until(process.stderr.fileno(), b"listening\n")
            process.send_signal(signal.SIGINT)
            read_until(process.stderr.fileno(), b"press Ctrl-C again to stop at once\n")
            process.send_signal(signal.SIGINT)
            assert process.stderr.read().endswith(b"Stopped at once; what was being written is not kept.\n")
            assert process.wait() == 130
        finally:
            process.kill()


def test_a_terminal_that_is_closed_stops_a_run_which_still_saves(root, tmp_path):
    """Nothing can be written to it any more, and nothing is to fail of that."""
    terminal, own = pty.openpty()
    command = [sys.executable, "-c", LISTENING.replace("CASE", "until_asked"), tmp_path / "saved"]
    with subprocess.Popen(command, cwd=root, stdin=own, stdout=own, stderr=own, start_new_session=True) as process:
        try:
            os.close(own)
            read_until(terminal, b"ready")
            os.close(terminal)
            assert process.wait() == 0
        finally:
            process.kill()
    assert (tmp_path / "saved").read_text() == "SIGHUP"


def test_the_command_line_ends_with_130_and_one_line(
    torchport, capsys, interrupted, encoded, tmp_path, root, request_for
):
    small = [part for override in request_for().overrides for part in ("--set", override)]
    command = ["run", "--model", "hunyuan", "--config", "demo", "--stage", "denoise", "--backend", "original", *small]
    command += ["--path", root, "--inputs", encoded, "--out", "made", "--quiet"]
    interrupted(1)
    code, out, err = torchport(*command, capsys=capsys)
    assert (code, out) == (130, []) and err[-1] == (
        "error[TP701] Ctrl-C: Stopped after step 1 of 3; what was finished is in made. "
        "Go on with the same command and --out made."
    )


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory, encoded, root):
    """The folder of a run that was stopped after its first step."""
    from torchport.task import Request

    folder = tmp_path_factory.mktemp("stopped")
    small = ("height=64", "width=64", "frames=5", "steps=3")
    request = Request("hunyuan", "configs/demo.yaml", out=folder, inputs=encoded, stage="denoise", backend="original")
    with pytest.MonkeyPatch.context() as context, pytest.raises(StoppedError):
        context.setattr(Stopping, "__init__", lambda self: setattr(self, "cause", True))
        context.setattr(Stopping, "check", checked_after_a_step(Stopping.check))
        run(dataclasses.replace(request, overrides=small, paths=(str(root),)))
    return folder


def checked_after_a_step(check):
    """Returns a check that lets the beginning of a stage pass."""
    return lambda self, folder, when: check(self, folder, when) if when.startswith("after") else None


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A copy of that folder, where these tests' requests would go on."""
    return shutil.copytree(stopped_once, tmp_path / "out")


def test_the_partial_says_how_far_it_came(stopped):
    manifest = save.read_manifest(stopped / "denoise.partial.safetensors")
    assert manifest.done == 1 and manifest.stage == "denoise" and manifest.backend == "original"


def refusal(request):
    """Returns the text of the refusal to go on."""
    with pytest.raises(TorchportError) as caught:
        run(request)
    assert type(caught.value) is ArtefactForeignError
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"seed": 7}, "A run with seed 42 was stopped here, and this one has 7"),
        ({"sets": ("steps=4",)}, "A run with steps 3 was stopped here, and this one has 4"),
        ({"sets": ("guidance_scale=5.0",)}, "A run with guidance_scale 3.0 was stopped here, and this one has 5.0"),
        ({"sets": ("dtypes.transformer=bfloat16",)}, "A run with dtypes {"),
        ({"backend": "torchax"}, "A run with backend 'original' was stopped here, and this one has 'torchax'"),
        ({"sets": ("frames=9",)}, "'denoise.partial' was made for frames 5, and this run is for 9"),
    ],
)
def test_unfinished_latents_of_other_settings_are_refused_and_left_as_they_are(
    stopped, denoise, changes, fact, unchanged
):
    sets = changes.pop("sets", ())
    request = denoise(**changes)
    before = unchanged(stopped)
    text = refusal(dataclasses.replace(request, overrides=(*request.overrides, *sets)))
    assert text.startswith(f"{stopped}/denoise.partial.safetensors: {fact}")
    assert unchanged(stopped) == before


def test_the_command_line_refuses_by_name_to_go_on_with_another_job(stopped, encoded, torchport, capsys, unchanged):
    small = [word for one in ("height=64", "width=64", "frames=5", "steps=3") for word in ("--set", one)]
    words = ("run", "--model", "hunyuan", "--config", "configs/demo.yaml", *small, "--backend", "original")
    flags = ("--stage", "denoise", "--inputs", encoded, "--out", stopped, "--set", "save_every=2", "--seed", "7")
    before = unchanged(stopped)
    code, _, said = torchport(*words, *flags, capsys=capsys)
    assert (code, said[-1]) == (
        2,
        f"error[TP603] {stopped}/denoise.partial.safetensors: A run with seed 42 was stopped here, and this one has 7. "
        "Finish that run, or remove denoise.partial.safetensors, or choose another --out.",
    )
    assert unchanged(stopped) == before


@pytest.mark.parametrize(
    ("sets", "fact"),
    [
        (["strategy=tp_replicated_rows"], "strategy 'tp' was stopped here, and this one has 'tp_replicated_rows'"),
        (["attention=xla"], "attention None was stopped here, and this one has 'xla'"),
        (["stacked=false"], "stacked True was stopped here, and this one has False"),
        (["machine=cpu:4", "mesh.dp=1"], "machine 'cpu:8' was stopped here, and this one has 'cpu:4'"),
        (["mesh={dp: 1, tp: 8}"], "mesh {'dp': 2, 'tp': 4} was stopped here, and this one has {'dp': 1, 'tp': 8}"),
        (["fps=9", "save_every=2"], None),
    ],
)
def test_a_run_is_not_finished_by_a_program_that_rounds_otherwise(stopped, denoise, forged, sets, fact):
    file = stopped / "denoise.partial.safetensors"
    request = denoise(backend="torchax")
    task = accept(request)
    forged(file, backend="torchax", **task.code(task.stages[0]))
    made = save.read_manifest(file)
    unfinished = resume.Unfinished(accept(dataclasses.replace(request, overrides=(*request.overrides, *sets))))
    weights = checkpoint.Checkpoint(stopped, made.checkpoint, made.components)
    if fact is None:
        assert unfinished.read(weights, made.inputs)[0] == 1
        return
    with pytest.raises(ArtefactForeignError, match=re.escape(f"{file}: A run with {fact}. Finish that run")):
        unfinished.read(weights, made.inputs)


def test_unfinished_latents_of_other_code_are_refused(stopped, denoise, forged):
    made = stopped / "denoise.partial.safetensors"
    code = save.read_manifest(made).code
    file = next(name for name in code if name.endswith(".py"))
    forged(made, code={**code, file: "0123456789abcdef"})
    assert f"A run with code.{file} '0123456789abcdef' was stopped here, and this one has '" in refusal(denoise())
    forged(made, code={**code, "patches/up/gone.py": "feed"})
    assert "A run with code.patches/up/gone.py 'feed' was stopped here, and this one has None" in refusal(denoise())


def test_unfinished_latents_of_an_older_schema_say_how_to_get_past_them(stopped, denoise, forged):
    forged(stopped / "denoise.partial.safetensors", schema_version=1)
    assert refusal(denoise()).endswith("make the artefact again with: the same command, after removing it.")


def test_unfinished_latents_of_other_versions_are_refused(stopped, denoise, forged):
    """Another torch may round otherwise: the rest of the steps would make latents that neither makes alone."""
    file = stopped / "denoise.partial.safetensors"
    forged(file, versions={**save.read_manifest(file).versions, "torch": "2.0.0"})
    assert "A run with version of torch '2.0.0' was stopped here, and this one has '" in refusal(denoise())


@pytest.fixture
def at_commit(monkeypatch):
    """Makes this run one of a checkout at a commit."""

    def at(commit, dirty=False):
        upstream = checkout.Upstream("up", Revision(commit, dirty, "" if commit else "no git repository"))
        monkeypatch.setattr(checkout, "upstream", lambda *_: upstream)
        return upstream.row()

    return at


ONE, OTHER = "1" * 40, "2" * 40


@pytest.mark.parametrize(
    ("commit", "dirty", "fact"),
    [
        (OTHER, False, f"A run with commit of up '{ONE}' was stopped here, and this one has '{OTHER}'"),
        (ONE, True, "A run with changes to up's commit False was stopped here, and this one has True"),
        (None, False, f"A run with commit of up '{ONE}' was stopped here, and this one has None"),
    ],
)
def test_unfinished_latents_of_another_commit_of_a_checkout_are_refused(
    stopped, denoise, forged, at_commit, commit, dirty, fact
):
    forged(stopped / "denoise.partial.safetensors", upstream=at_commit(ONE))
    at_commit(commit, dirty)
    assert fact in refusal(denoise())


def test_unfinished_latents_of_the_same_commit_are_finished(stopped, denoise, forged, at_commit):
    forged(stopped / "denoise.partial.safetensors", upstream=at_commit(ONE))
    summary = run(denoise())
    assert summary.steps == 2 and str(summary.upstream) == "up at commit 111111111111"
    assert save.read_manifest(stopped / "denoise.safetensors").upstream.commit == ONE


def test_an_artefact_of_another_commit_is_taken_with_a_warning(encoded, denoise, forged, at_commit, tmp_path, caplog):
    inputs = shutil.copytree(encoded, tmp_path / "inputs")
    forged(inputs / "encode.safetensors", upstream=at_commit(ONE))
    request = dataclasses.replace(denoise(), inputs=inputs)
    for commit, words in ((ONE, []), (None, ["no commit (no git repository)"])):
        at_commit(commit)
        caplog.clear()
        with caplog.at_level("WARNING", log.name):
            run(request)
        text = f"{inputs}/encode.safetensors was made by up at commit 111111111111; this run has up at "
        assert [one.getMessage() for one in caplog.records] == [text + word for word in words]


def test_a_run_of_installed_packages_has_no_upstream_in_its_manifest(stopped):
    assert save.read_manifest(stopped / "denoise.partial.safetensors").upstream is None


def test_the_remedy_names_all_three_ways_out(stopped, denoise):
    assert refusal(denoise(seed=7)).endswith(
        "Finish that run, or remove denoise.partial.safetensors, or choose another --out."
    )


def test_unfinished_latents_of_other_noise_are_refused(stopped, denoise):
    noise = torch.zeros(1, 16, 2, 4, 4)
    assert "A run with noise " in refusal(denoise(noise=noise))


def test_unfinished_latents_of_other_embeddings_are_refused(stopped, denoise, request_for, tmp_path):
    other = tmp_path / "other"
    run(request_for(stage="encode", prompt="A dog", out=other))
    assert "The run that was stopped here had other embeddings. Finish that run" in refusal(
        dataclasses.replace(denoise(), inputs=other)
    )


def test_unfinished_latents_that_are_damaged_are_refused(stopped, denoise):
    file = stopped / "denoise.partial.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtefactBrokenError) as caught:
        run(denoise())
    assert str(caught.value) == (
        f"{file}: Its tensors are not those that were written. "
        "Copy the file again, or make it with: the same command, after removing it."
    )


@pytest.mark.parametrize("done", [0, -1, 2.9, True, "1", None, float("inf"), 3, 1000])
def test_a_number_of_steps_that_cannot_be_is_refused(stopped, denoise, done, forged):
    forged(stopped / "denoise.partial.safetensors", done=done)
    with pytest.raises(ArtefactBrokenError, match=r"Its manifest's field 'done' is|Its latents have gone through"):
        run(denoise())


def test_a_number_of_steps_that_was_changed_is_refused(stopped, denoise):
    file = stopped / "denoise.partial.safetensors"
    data = file.read_bytes()
    assert data.count(b'\\"done\\": 1') == 1
    file.write_bytes(data.replace(b'\\"done\\": 1', b'\\"done\\": 2'))
    with pytest.raises(ArtefactBrokenError, match=r"Its manifest is not the one that was written"):
        run(denoise())


def full(*args, **kwargs):
    """Stands for a call on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_save_that_fails_leaves_the_one_before_and_says_where_a_rerun_goes_on(denoise, whole, monkeypatch, tmp_path):
    out, write = tmp_path / "out", save.write

    def filling(folder, name, tensors, facts):
        if facts.get("done") == 2:
            with monkeypatch.context() as context:
                context.setattr("os.fsync", full)
                return write(folder, name, tensors, facts)
        return write(folder, name, tensors, facts)

    request = denoise(overrides=("height=64", "width=64", "frames=5", "steps=3", "save_every=1"))
    with monkeypatch.context() as context, pytest.raises(OutputError) as caught:
        context.setattr(save, "write", filling)
        run(request)
    assert str(caught.value) == (
        f"{out}/denoise.partial.safetensors: The disk is full. Free some space, or choose another folder with --out; "
        f"the same command with --out {out} then goes on after step 1 of 3."
    )
    assert names(out) == PARTIAL
    assert run(request).steps == 2 and bits(out) == whole("original")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_refused_in_its_step_and_the_latents_saved_before_it_stay(
    denoise, monkeypatch, tmp_path, value
):
    out = tmp_path / "out"
    request = denoise(overrides=("height=64", "width=64", "frames=5", "steps=5", "save_every=2"))
    with monkeypatch.context() as context, pytest.raises(NotFiniteError) as caught:
        plant(context, "transformer", 5, value)  # both conditions of guidance are calls of their own
        run(request)
    assert re.fullmatch(
        r"'denoise', step 3 of 5 \(timestep \d+(\.\d+)?\): 'latents' has 1 of 512 values that are NaN or infinite\. "
        r"Run the same command into another folder with --no-jit, which names the module that computes them first\.",
        str(caught.value),
    ), str(caught.value)
    assert names(out) == PARTIAL and save.read_manifest(out / "denoise.partial.safetensors").done == 2
    assert run(request).steps == 3


@pytest.mark.parametrize(
    ("backend", "jit", "dtype", "remedy"),
    [
        (
            "torchax",
            True,
            "bfloat16",
            "Run the same command into another folder with --no-jit, which names the module that computes them first, "
            "or --set dtypes.transformer=float32, or --backend original: if that is finite, a patch or a precision is "
            "wrong, else the weights",
        ),
        (
            "torchax",
            False,
            "float32",
            "Run the same command into another folder with --backend original: if that is finite, a patch or a "
            "precision is wrong, else the weights",
        ),
        ("original", False, "float32", "Check the weights"),
    ],
)
def test_the_remedy_names_only_what_was_not_tried(denoise, backend, jit, dtype, remedy):
    request = denoise(backend=backend, execution=Execution(jit=jit))
    task = accept(dataclasses.replace(request, overrides=(*request.overrides, f"dtypes.transformer={dtype}")))
    [stage] = task.stages
    steps = resume.steps(task, stage, Stopping(), resume.Unfinished(task), dict, (0, {}))
    with pytest.raises(NotFiniteError) as caught:
        steps.finished(3, {"latents": torch.tensor([1.0, float("nan")])})
    assert caught.value.remedy == remedy and caught.value.place == "'denoise', step 3 of 3"


@pytest.mark.parametrize(
    ("values", "count"),
    [
        (torch.tensor([3e38, 3e38]), 0),  # their sum overflows
        (torch.tensor([6e4, 6e4]).half(), 0),
        (torch.tensor([float("inf"), -float("inf"), 1.0]).bfloat16(), 2),
        (torch.tensor([2**62, 2**62]), 0),
        (torch.tensor([]), 0),
    ],
)
def test_values_that_are_not_finite_are_counted(values, count):
    assert not_finite(values) == count


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"jit": False}, "jit False was stopped here, and this one has True"),
        ({"xla_flags": {"name": "some", "flags": ["--a=1"]}}, "xla flags {'name': 'some', 'flags': ['--a=1']} was"),
    ],
)
def test_unfinished_latents_of_another_compiler_are_refused(stopped, denoise, forged, changes, fact):
    forged(stopped / "denoise.partial.safetensors", **changes)
    assert f"A run with {fact}" in refusal(denoise())


def test_a_second_run_in_the_same_folder_is_refused(denoise, tmp_path):
    (tmp_path / "out").mkdir()
    with atomic.locked(tmp_path / "out"), pytest.raises(OutputError) as caught:
        run(denoise())
    assert str(caught.value).startswith(
        f"{tmp_path / 'out'}: Another run writes to this folder. Wait until it has ended, or choose another --out"
    )
    run(denoise())


def test_what_a_dead_run_left_half_written_is_removed(denoise, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".part-abc.safetensors").write_bytes(b"half")
    run(denoise())
    assert names(tmp_path / "out") == {"denoise.json", "denoise.safetensors", "manifest.json"}


def test_a_damaged_note_of_an_unfinished_run_costs_time_and_no_more(request_for, interrupted, tmp_path, caplog):
    interrupted(1)
    with pytest.raises(StoppedError):
        run(request_for(overrides=ONE_STEP))
    (tmp_path / "out" / resume.UNFINISHED).write_bytes(b"{")
    with pytest.raises(StoppedError):
        run(request_for(overrides=ONE_STEP))
    assert f"{resume.UNFINISHED} cannot be read: every stage is run again" in caplog.text


def test_pictures_that_were_not_written_before_a_kill_are_written_after_it(request_for, monkeypatch, tmp_path):
    def killed(*args):
        raise MemoryError

    with monkeypatch.context() as context, pytest.raises(MemoryError):
        context.setattr("torchport.run.journey.encoded", killed)
        run(request_for(overrides=ONE_STEP))
    assert "video.mp4" not in names(tmp_path / "out")
    made = save.file_of(tmp_path / "out", "decode").stat().st_mtime_ns
    summary = run(request_for(overrides=ONE_STEP))
    assert summary.video.is_file() and save.file_of(tmp_path / "out", "decode").stat().st_mtime_ns == made


def kept(folder):
    """The checksums of the latents after each step that a folder holds."""
    return {file.name: save.read_manifest(file).sha256 for file in folder.glob("denoise.step-*.safetensors")}


KEPT = ("height=64", "width=64", "frames=5", "steps=3", "keep_steps=true")


def test_a_stopped_run_keeps_the_latents_of_its_steps(denoise, interrupted, whole, tmp_path, monkeypatch):
    with monkeypatch.context():
        interrupted(2)
        with pytest.raises(StoppedError):
            run(denoise(overrides=KEPT))
    before = kept(tmp_path / "out")
    assert set(before) == {"denoise.step-0001.safetensors", "denoise.step-0002.safetensors"}
    monkeypatch.undo()
    assert run(denoise(overrides=KEPT)).steps == 1
    after = kept(tmp_path / "out")
    assert len(after) == 3 and before.items() < after.items(), "those before the stop are as they were"
    assert after["denoise.step-0003.safetensors"] == bits(tmp_path / "out") == whole("original"), "the last ones"
    run(denoise(overrides=KEPT))
    assert kept(tmp_path / "out") == after, "another run of the job makes the same bits"
    run(denoise())
    assert kept(tmp_path / "out") == {}, "a run that keeps none leaves none of an earlier one"


def test_latents_after_the_last_saved_step_are_taken_again(tmp_path):
    """A killed run may have kept later ones than it can go on from."""
    out = tmp_path / "out"
    out.mkdir()
    for number in (1, 2, 3, 17):
        save.file_of(out, save.step_name("denoise", number)).write_bytes(b"")
    save.remove_steps_after(out, "denoise", 2)
    assert save.step_numbers(out, "denoise") == [1, 2]
    assert save.step_numbers(out, "denoise_first") == []


def test_a_loop_whose_latents_have_another_name_cannot_keep_them(denoise):
    task = accept(denoise(overrides=KEPT))
    with pytest.raises(BadValueError) as refused:
        resume.Unfinished(task).keep(1, {"x": torch.zeros(1), "history": torch.zeros(1)}, {})
    assert str(refused.value) == (
        "--set keep_steps=true: 'keep_steps' is true, and the state of 'denoise' after a step has no 'latents', but "
        "'history', 'x'. Give them this name in `steps.finished` (docs/families.md), or leave 'keep_steps' out."
    )


def test_latents_that_are_not_finite_are_not_kept(denoise, tmp_path):
    unfinished = resume.Unfinished(accept(denoise(overrides=KEPT)))
    with pytest.raises(NotFiniteError, match=r"denoise\.step-0001\.safetensors: 'latents' has 1 of 2 values that are"):
        unfinished.keep(1, {"latents": torch.tensor([1.0, torch.nan])}, {})

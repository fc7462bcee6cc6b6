"""What every test stands on: 8 virtual CPU devices, no network, and a cache folder of the session's own."""

import functools
import gc
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest

CACHE = tempfile.mkdtemp(prefix="torchport-tests-")
# JAX reads these when it is imported, and child processes inherit them. All processes of a session share what they
# compile: most of them would compile the same few programs again.
os.environ.setdefault("TORCHPORT_TESTS_PROGRAMS", str(Path(CACHE) / "jax"))
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["TORCHPORT_TESTS_PROGRAMS"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402  after the variables that it reads
from budget import Budget  # noqa: E402

hypothesis.settings.register_profile("torchport", deadline=None, max_examples=25)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=250)
hypothesis.settings.load_profile("torchport")

# JAX fixes both when its backend starts, which is the first thing that any test of a mesh does.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

# The libraries read these when they are imported, so no fixture would be early enough; subprocesses inherit them.
os.environ["XDG_CACHE_HOME"] = CACHE
os.environ["HF_HOME"] = str(Path(CACHE) / "huggingface")
os.environ["HF_HUB_OFFLINE"] = "1"
# A program that another test has traced would hide what this one changes; the tests of caches name a folder.
os.environ["TORCHPORT_CACHE"] = "off"
os.environ.pop("TORCHPORT_PATH", None)
# OpenMP's threads wait for each other by spinning. Where other processes want the same cores, PyTorch's operators on
# tiny tensors take twice the processor time with two threads that they take with one.
os.environ["OMP_NUM_THREADS"] = "1"
# By default the collector begins after 700 new objects; beside the million of torch and JAX its passes are wasted.
gc.set_threshold(20_000, 20, 20)

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser):
    """Adds the flag of the budget."""
    parser.addoption("--budget", action="store_true", help="print the tests' processor time, whatever is chosen")


def pytest_configure(config):
    """Registers the budget of processor time."""
    config.pluginmanager.register(Budget(config), "budget-of-processor-time")


def pytest_unconfigure():
    """Removes the session's cache folder, with the tiny checkpoint in it."""
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def frozen_between_files():
    """Freezes what is alive after a file of tests, as pytest does after the collection: patches have thawed it.

    A pass of the collector over the million objects of torch, JAX and diffusers costs every later test. There is none
    here, either: garbage is frozen, too, until the next patch thaws it.
    """
    yield
    gc.freeze()


@pytest.fixture
def own_jax_cache():
    """JAX as a user has it who has named no folder of programs: the tests' own session names one."""
    from jax.experimental.compilation_cache import compilation_cache

    named = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", named)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def plainly_compiled():
    """Has XLA compile without most of its optimisations: for programs that run once, they take longer than the run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def root():
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def pack():
    """torchport's own pack of patches and configs."""
    from torchport.config.pack import find_pack

    return find_pack((str(ROOT),))


@pytest.fixture(scope="session")
def card(pack):
    """The model card of HunyuanVideo-1.5 through diffusers."""
    return pack.card("hunyuan")[0]


@pytest.fixture(scope="session")
def tiny_folder(card):
    """The card's tiny checkpoint, written once for the session; tests that change it copy it."""
    from fakes.families import HUNYUAN

    from torchport.load import tiny

    return tiny.write(card, HUNYUAN)


@pytest.fixture(scope="session")
def published(card):
    """The published networks on meta, by component: their own classes' default configuration."""
    from torchport import load

    return {name: load.published(card.components[name].class_, {}) for name in ("transformer", "vae")}


@pytest.fixture(scope="session")
def mesh8():
    """The demo's mesh, dp=2 x tp=4."""
    from torchport import shard

    return shard.make_mesh({"dp": 2, "tp": 4}, jax.devices())


@pytest.fixture
def request_for(tmp_path):
    """Makes requests for the demo at its smallest size, into `tmp_path / "out"`, on the original backend."""
    from torchport.task import Request

    small = ("height=64", "width=64", "frames=5", "steps=3")
    return functools.partial(
        Request,
        model="hunyuan",
        config="configs/demo.yaml",
        prompt="A cat",
        out=tmp_path / "out",
        backend="original",
        overrides=small,
        paths=(str(ROOT),),
    )


@pytest.fixture
def torchport(monkeypatch, tmp_path):
    """Runs the command line in this process and folder `tmp_path`; returns its exit code and lines of stdout, stderr.

    Only `main` is called: an exception that it lets through, which would be a traceback for a person, fails the test.
    """
    import logging
    import warnings

    from torchport import __main__

    monkeypatch.chdir(tmp_path)

    def call(*args, capsys):
        monkeypatch.setattr("sys.argv", ["torchport", *map(str, args)])
        level = logging.getLogger("torchport").level
        with warnings.catch_warnings(), pytest.raises(SystemExit) as stop:
            __main__.main()
        logging.getLogger("torchport").setLevel(level)
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out.splitlines(), captured.err.splitlines()

    return functools.partial(call)


def listing(folder):
    """Returns every file below a folder with its bytes, and every folder: what must not change."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


@pytest.fixture
def unchanged():
    """Gives a function that lists a folder, to be compared before and after."""
    return listing


@pytest.fixture
def forged():
    """Gives a function that changes fields of an artefact's manifest and makes its checksum right again."""
    import hashlib
    import json

    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    def forge(file, remove=(), **changes):
        with safe_open(str(file), framework="pt") as stream:
            manifest = json.loads(stream.metadata()["torchport"])
        manifest = {key: value for key, value in {**manifest, **changes}.items() if key not in remove}
        text = json.dumps(manifest)
        noted = {"torchport": text, "torchport.sha256": hashlib.sha256(text.encode()).hexdigest()}
        save_file(load_file(file), file, noted)
        file.with_suffix(".json").unlink(missing_ok=True)

    return forge

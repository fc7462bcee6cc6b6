"""An upstream that is a checkout: found, told from another of the same name, and put on the path for a run only."""

import os
import sys

import pytest
from fakes.checkouts import committed

from torchport.config import checkout as upstream
from torchport.config.card import Checkout
from torchport.errors import UpstreamError

CHECKOUT = Checkout(
    package="someupstream", has="someupstream/new.py", others={"someupstream/old.py": "Some 1.0"}, url="https://x/y"
)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "someupstream").mkdir()
    (tmp_path / "someupstream" / "__init__.py").write_text("import os\nos.environ['SOME_RANK'] = '0'\n")
    (tmp_path / "someupstream" / "new.py").write_text("x = 1\n")
    return tmp_path


def refusal(checkout, named):
    with pytest.raises(UpstreamError) as caught:
        upstream.find(checkout, named)
    return str(caught.value)


def test_a_checkout_is_found(checkout):
    assert upstream.find(CHECKOUT, str(checkout)) == checkout.resolve()


def test_a_package_may_be_a_single_file(tmp_path):
    (tmp_path / "net.py").write_text("")
    one = Checkout(package="net", has="net.py", url="https://x/y")
    assert upstream.find(one, str(tmp_path)) == tmp_path.resolve()
    committed(tmp_path)
    assert upstream.upstream(one, tmp_path).revision.dirty is False
    (tmp_path / "net.py").write_text("x = 1")
    assert upstream.upstream(one, tmp_path).revision.dirty is True


def test_a_missing_path_says_what_to_clone():
    assert refusal(CHECKOUT, None) == (
        "--upstream-path: It is missing, and 'someupstream' is a checkout. "
        "git clone https://x/y, and pass --upstream-path DIR."
    )


def test_a_folder_without_the_package_is_refused(tmp_path):
    assert refusal(CHECKOUT, str(tmp_path)).startswith(
        f"--upstream-path {tmp_path}: There is no package 'someupstream' in it."
    )


def test_a_package_below_src_is_named_with_its_folder(tmp_path):
    (tmp_path / "src/someupstream").mkdir(parents=True)
    said = refusal(CHECKOUT, str(tmp_path))
    assert said.endswith(f"It lies below src: write --upstream-path {tmp_path}/src.")


def test_another_upstream_of_the_same_name_is_recognised(checkout):
    (checkout / "someupstream" / "new.py").rename(checkout / "someupstream" / "old.py")
    assert "This is Some 1.0: it has someupstream/old.py." in refusal(CHECKOUT, str(checkout))


def test_a_checkout_without_its_mark_is_refused(checkout):
    (checkout / "someupstream" / "new.py").unlink()
    assert "It has no someupstream/new.py." in refusal(CHECKOUT, str(checkout))


def test_a_path_that_nothing_would_read_is_refused(checkout):
    assert "This model's upstreams are installed packages. Leave the flag out." in refusal(None, str(checkout))
    assert upstream.find(None, None) is None


def test_a_copy_imported_from_elsewhere_is_refused(checkout, tmp_path_factory, monkeypatch):
    module = type(sys)("someupstream")
    module.__file__ = str(tmp_path_factory.mktemp("other") / "__init__.py")
    monkeypatch.setitem(sys.modules, "someupstream", module)
    assert f"'someupstream' was imported from {module.__file__}. Start a new process." in refusal(
        CHECKOUT, str(checkout)
    )


def test_the_path_and_the_environment_are_restored(checkout):
    before = list(sys.path), dict(os.environ)
    with upstream.on_path(checkout):
        assert sys.path[0] == str(checkout)
        import someupstream  # noqa: F401

        assert os.environ["SOME_RANK"] == "0"
    sys.modules.pop("someupstream")
    assert (list(sys.path), dict(os.environ)) == before


def test_nothing_changes_for_installed_upstreams():
    before = list(sys.path)
    with upstream.on_path(None):
        assert sys.path == before


def test_a_checkout_is_at_a_commit_with_or_without_changes(checkout):
    folder = upstream.find(CHECKOUT, str(checkout))
    assert str(upstream.upstream(CHECKOUT, folder)) == "someupstream at no commit (no git repository)"
    commit = committed(checkout)
    assert upstream.upstream(CHECKOUT, folder).row() == {"package": "someupstream", "commit": commit, "dirty": False}
    (checkout / "someupstream" / "new.py").write_text("x = 2\n")
    assert upstream.upstream(CHECKOUT, folder).row()["dirty"]
    assert str(upstream.upstream(CHECKOUT, folder)) == f"someupstream at commit {commit[:12]} with changes"


def test_installed_packages_are_at_no_commit():
    assert upstream.upstream(None, None) is None

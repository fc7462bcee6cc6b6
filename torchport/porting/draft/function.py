"""The Python of a patch before it is filled in: the target's own parameters, and a body that raises."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Sequence

from torchport.porting.draft.target import Target, parameters
from torchport.source.parameters import Function

FUTURE = "from __future__ import annotations\n"
ORIGINAL = "original"


def head(names: str) -> str:
    """Returns what a new file of functions begins with.

    Args:
        names: The file of entries, as a card lists it.
    """
    return f'"""Functions of the patches in {names}.yaml."""\n\n{FUTURE}\n\n'


def name_of(path: Sequence[str]) -> str:
    """Returns the name of a function that stands for an attribute path."""
    snake = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", part.strip("_")).lower() for part in path]
    name = re.sub(r"\W", "_", "_".join(part for part in snake if part)) or "patched"
    return f"{name}_" if keyword.iskeyword(name) or name[0].isdigit() else name


def replacement(target: Target, name: str) -> str:
    """Returns a function, or a class, that takes the target's place."""
    if isinstance(target.node, ast.ClassDef):
        return _class(target, target.node, name)
    return _function(target, target.node, name, None)


def wrapper(target: Target, name: str) -> str:
    """Returns a function that receives the target as its first argument.

    Around a generator function it is a plain one, which returns what the original returns.
    """
    assert not isinstance(target.node, ast.ClassDef)
    taken = {one.strip("*") for one in parameters(target.node).names}
    return _function(target, target.node, name, ORIGINAL if ORIGINAL not in taken else f"{ORIGINAL}_function")


def _function(target: Target, node: Function, name: str, original: str | None) -> str:
    given = parameters(node, original)
    what = ".".join(target.path)
    lines = [f'"""Fill in: does what {what} does ({target.place}).']
    if original is not None:
        passed = ", ".join(parameters(node).names)
        call = "await " if target.is_async else ""
        lines = [f'"""Fill in: takes the place of {what} ({target.place}), which is `{call}{original}({passed})`.']
    if given.unknown:
        lines += ["", f"    Upstream's defaults that are `...` here: {'; '.join(given.unknown)}."]
    if target.decorators:
        outside = ", ".join(f"@{one}" for one in target.decorators)
        lines += ["", f"    It takes the place of the function with its decorators: {outside}."]
    doc = "\n".join(lines) + ('"""' if len(lines) == 1 else '\n    """')
    word = "async def" if target.is_async else "def"
    body = f'    raise NotImplementedError("fill in {name}")\n'
    if target.is_generator and original is None:  # one statement, which makes it a generator function
        body = f'    yield from (_ for _ in ()).throw(NotImplementedError("fill in {name}"))\n'
    return f"{word} {name}({given.text}):\n    {doc}\n{body}"


def put(name: str, given: Sequence[str], gives: str, where: str) -> str:
    """Returns the function of a rewrite.

    Args:
        name: Its name.
        given: Its parameters: names that are bound in upstream's function.
        gives: What it returns, in words.
        where: What it takes the place of, in words.
    """
    returns = f" Returns {gives}." if gives else ""
    doc = f'"""Fill in: does what is done at {where}.{returns}"""'
    return f'def {name}({", ".join(given)}):\n    {doc}\n    raise NotImplementedError("fill in {name}")\n'


def lowering(name: str, given: str, operator: str) -> str:
    """Returns the function of an `op`."""
    doc = f'"""Fill in: computes {operator} of the engine\'s tensors, with torchport.engine.call_jax."""'
    return f'def {name}({given}):\n    {doc}\n    raise NotImplementedError("fill in {name}")\n'


def _class(target: Target, node: ast.ClassDef, name: str) -> str:
    """Returns a class with the public methods of the target's own body."""
    bases = ", ".join(map(ast.unparse, node.bases))
    is_module = any(ast.unparse(base) in ("nn.Module", "torch.nn.Module", "Module") for base in node.bases)
    above = f", which derives from {bases}" if bases else ""
    text = [f"class {name}({'torch.nn.Module' if is_module else ''}):".replace("()", "")]
    text.append(f'    """Fill in: does what {".".join(target.path)} does ({target.place}){above}."""')
    for method in node.body:
        if isinstance(method, Function) and (method.name == "__init__" or not method.name.startswith("_")):
            text += ["", *_method(method)]
    lines = "\n".join(text) + "\n"
    return f"import torch\n\n\n{lines}" if is_module else lines


def _method(method: Function) -> list[str]:
    kinds = [ast.unparse(one).rpartition(".")[2].replace("cached_", "") for one in method.decorator_list]
    lines = [f"    @{one}" for one in kinds if one in ("staticmethod", "classmethod", "property")]
    word = "async def" if isinstance(method, ast.AsyncFunctionDef) else "def"
    lines.append(f"    {word} {method.name}({parameters(method).text}):")
    return [*lines, f'        raise NotImplementedError("fill in {method.name}")']

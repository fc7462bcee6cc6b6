"""Rules for the names of tensors: from the names in a file to those of a module, and back."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from torchport.config.card import RenameRule
from torchport.errors import BadValueError, CheckpointForeignError, DeadRuleError

TURNED = (
    "Tiny weights need it turned round: put all that varies in 'match' into groups without groups inside, and use each "
    "of them in 'to'"
)


def module_names(
    names: Collection[str], rules: Sequence[RenameRule], places: Sequence[str], file: str
) -> dict[str, str]:
    """Returns the name in the file of each tensor of a module, `{"blocks.0.bias": "model.blocks.0.bias"}`. The first
    rule that matches a whole name of the file renames it. Raises if two names become one, or if a rule renames nothing:
    `places` are where the card has each rule.
    """
    name_in_file: dict[str, str] = {}
    rule_of: dict[str, int | None] = {}
    for name in names:
        new, rule_of[name] = renamed(name, rules)
        if new in name_in_file:
            fact = f"'{name_in_file[new]}' and '{name}' of {file} both become '{new}'"
            remedy = "Mend the rules, or add the one that is not used to 'unread'"
            # At least one of the two was renamed: their names in the file differ.
            numbers = [n for n in (rule_of[name], rule_of[name_in_file[new]]) if n is not None]
            raise CheckpointForeignError(places[numbers[0]], fact, remedy, name=new)
        name_in_file[new] = name
    used = set(rule_of.values())
    for number, rule in enumerate(rules):
        if number not in used:
            found = f"none of {len(names)} tensors of {file}"
            if any(re.fullmatch(rule.match, name) for name in names):
                found = f"only tensors of {file} that an earlier rule has taken"
            fact = f"Rule {number + 1}, '{rule.match}', matches {found}"
            plain = rule.match.replace("\\.", ".").replace("\\d+", "0")
            remedy = f"Remove it or mend it. {closest(plain, names)}"
            raise DeadRuleError(places[number], fact, remedy, rule=rule.match)
    return name_in_file


def renamed(name: str, rules: Sequence[RenameRule]) -> tuple[str, int | None]:
    """Returns a name as the first matching rule renames it, with the rule's number; without one the name and None."""
    for number, rule in enumerate(rules):
        if match := re.fullmatch(rule.match, name):
            return match.expand(rule.to), number
    return name, None


def closest(name: str, names: Collection[str]) -> str:
    """Returns a sentence with the few names that are closest to `name`, of maybe thousands."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or sorted(names)[:3]
    return f"The nearest are {', '.join(map(repr, close))}" if close else "There are none"


def file_names(
    names: Iterable[str], rules: Sequence[RenameRule], places: Sequence[str], is_unread: Callable[[str], bool]
) -> dict[str, str]:
    """Returns a name in the file for each tensor of a module: the inverse of `module_names`. The rules turn this name
    into the tensor's name, and it is not `is_unread`. Raises if there is none, or if a rule renames nothing.
    """
    inverses = [inverse for inverse in map(_inverse, rules) if inverse is not None]
    fitting: dict[str, list[str]] = {}
    for name in names:
        candidates = [*filter(None, (inverse(name) for inverse in inverses)), name]
        fitting[name] = [c for c in candidates if renamed(c, rules)[0] == name and not is_unread(c)]
        if not fitting[name]:
            fact = f"No name in the file that becomes '{name}' can be told from the rules"
            raise BadValueError(places[0], fact, TURNED, name=name)
    name_in_file = {name: sources[0] for name, sources in fitting.items()}
    for number, rule in enumerate(rules):
        rule_of = {name: renamed(source, rules)[1] for name, source in name_in_file.items()}
        uses = list(rule_of.values())
        if number in uses:
            continue
        # An earlier rule may have taken this rule's tensors. It gives one up if it renames several: a rule that
        # renames nothing is refused when the file is read.
        free = [name for name in fitting if uses.count(rule_of[name]) > 1]
        others = ((name, source) for name in free for source in fitting[name] if renamed(source, rules)[1] == number)
        other = next(others, None)
        if other is None:
            fact = f"Rule {number + 1}, '{rule.match}', names no tensor of the tiny module"
            raise BadValueError(places[number], fact, TURNED if _inverse(rule) is None else "Remove it, or mend it")
        name_in_file[other[0]] = other[1]
    return name_in_file


def _inverse(rule: RenameRule) -> Callable[[str], str | None] | None:
    """Returns the inverse of a rule, a function from a module's name to the file's; None if there is none. For the rule
    from `model\\.(.*)` to `\\1` the function turns `blocks.0` into `model.blocks.0`. It returns None for a name that
    the rule never produces.
    """
    parts = _parts(rule.match)
    if parts is None:
        return None
    pieces, groups = parts
    # A pattern for the module's names: the text of `to`, with each `\1` as the first group of `match`, named `g1`.
    pattern, seen = "", set()
    for number, piece in enumerate(re.split(r"\\(\d+)", rule.to)):
        # `split` returns texts and group numbers in turn.
        if number % 2 == 0:
            pattern += re.escape(piece)
            continue
        pattern += f"(?P=g{piece})" if piece in seen else f"(?P<g{piece}>{groups[int(piece) - 1]})"
        seen.add(piece)
    if len(seen) != len(groups):
        return None

    def name_in_file(name: str) -> str | None:
        match = re.fullmatch(pattern, name)
        if match is None:
            return None
        texts = [piece if isinstance(piece, str) else match[f"g{piece}"] for piece in pieces]
        return "".join(texts)

    return name_in_file


def _parts(pattern: str) -> tuple[list[str | int], list[str]] | None:
    """Returns a pattern's text and group numbers in order, and the groups' patterns; None if it has other syntax:
    `a\\.(.*)` -> `(["a", ".", 1], [".*"])`. A dot outside groups counts as a dot: in a name it stands for itself.
    """
    pieces: list[str | int] = []
    groups: list[str] = []
    place = 0
    while place < len(pattern):
        character = pattern[place]
        if character == "(":
            group = _group(pattern, place + 1)
            if group is None:
                return None
            groups.append(group)
            pieces.append(len(groups))
            place += len(group) + 2
        elif character == "\\" and not pattern[place + 1].isalnum():  # an escaped sign, `\.`
            pieces.append(pattern[place + 1])
            place += 2
        elif character in "\\*+?{[|^$":
            return None
        else:
            pieces.append(character)
            place += 1
    return pieces, groups


def _group(pattern: str, start: int) -> str | None:
    """Returns the pattern in a group, `a|b` of `(a|b).c` from 1 on; None if it has groups inside, or does not end."""
    for end in (match.start() for match in re.finditer(r"\)", pattern[start:])):
        try:
            inner = re.compile(pattern[start : start + end])
        # This `)` may be a part of the group, as in `([)])`.
        except re.error:
            continue
        return None if inner.groups else inner.pattern
    return None

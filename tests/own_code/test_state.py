"""What a ported module keeps from call to call, and what it leaves in its arguments: as PyTorch's forward does."""

import argparse
import collections
import concurrent.futures
import contextvars
import copy
import pickle
import queue
import threading
import warnings

import numpy
import pytest
import torch

import torchport
from torchport import engine
from torchport.errors import BadValueError, ForeignError, HostTensorError, OperatorError, StackError

pytestmark = pytest.mark.usefixtures("plainly_compiled")

RULES = {"weights": [], "inputs": [{"match": ".*", "spec": "replicate"}]}


class Module(torch.nn.Module):
    """It does one thing: a function of itself and its arguments."""

    def __init__(self, act, **attributes):
        super().__init__()
        self.act = act
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.act(self, *args)


class Store:
    """No module: an object that holds tensors, as a cache of keys and values does."""

    def __init__(self):
        self.parts = []

    def __eq__(self, other):
        return len(self.parts) == len(other.parts) and all(map(torch.equal, self.parts, other.parts))

    __hash__ = object.__hash__


def counts(m, x):
    m.n += 1
    return x * m.n


def alternates(m, x):
    m.n = not m.n
    return x if m.n else -x


def grows(m, x):
    m.kept = x if m.kept is None else torch.cat([m.kept, x])
    return m.kept.sum(0)


def keeps_the_first(m, x):
    if m.kept is None:
        m.kept = x.mean()
    return x - m.kept


def keeps_a_table(m, x):
    if len(x) not in m.tables:
        m.tables[len(x)] = torch.arange(len(x), device=x.device)
    return x + m.tables[len(x)][:, None]


def moves_to_the_end(m, x):
    m.n.move_to_end("a" if next(iter(m.n)) == "a" else "b")
    return x * next(iter(m.n.values()))


def appends(m, x):
    m.parts.append(x)
    return sum(m.parts)


def removes(m, x):
    if hasattr(m, "n"):
        del m.n
        return x
    return x + 1


def stores(m, x):
    m.store.parts.append(x * 2)
    return sum(m.store.parts)


def notes(m, x):
    m.note = x * 2
    return m.note + 1


def rotates(m, x):
    if m.ring is None:
        m.ring = x.new_zeros(4, 3)
    m.ring[m.start : m.start + 2] = x
    m.start = (m.start + 2) % 4
    return m.ring * 1


def shares(m, x):
    m.part.parts.append(x)
    return sum(m.parts)


class Slots:
    """An object without a dict: what it is given to count, and what it keeps."""

    __slots__ = ("kept", "n")

    def __init__(self):
        self.n = 0

    def add(self, x):
        self.n += 1
        self.kept = x if self.n == 1 else self.kept + x
        return self.kept * self.n


class Total(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.total = self.total + x.sum(0)
        return x + self.total


def closure():
    n, kept = 0, collections.deque(maxlen=2)

    def act(x):
        nonlocal n
        n += 1
        kept.append(x)
        return sum(kept) * n

    return act


class Items(dict):
    """No plain dict, as upstream's outputs are none."""


def in_items(m, x):
    m.items["n"] = m.items.get("n", 0) + 1
    m.words.update("ab")
    return x * m.items["n"] * m.words["a"]


def in_a_circle(m, x):
    m.circle[0].append(len(m.circle[0]))
    return x * len(m.circle[0])


def to_and_fro(m, x):
    if m.seen:
        m.seen.clear()
        m.made = None
        return x * 2
    m.seen.add(1)
    m.made = Slots()
    return m.made.add(x)


def calls(m, x):
    return m.call(x)


class Name(str):
    """A text with attributes."""


class Pair(tuple):
    """A tuple with attributes."""


def adds_to_objects(m, x):
    for one in m.objects:
        one.n += 1
        x = x * one.n
    m.sums |= {x}
    return sum(m.sums)


def in_arrays(m, x):
    m.bytes[0] += 1
    m.table["n"][0] += 1
    m.objects[0].n += 1
    return x * m.bytes[0] * int(m.table["n"][0]) * m.objects[0].n


def in_made_values(m, x):
    m.made = Name("a"), Pair((1, 2))
    for made in m.made:
        made.kept = x * len(made)
    return x, m.made, x.device


def writes_a_table(m, x):
    m.table[:, m.n] = x.sum(1)
    m.n += 1
    return m.table * 1


def queues(m, x):
    m.line.put(x * 2)
    m.settings.n = m.line.qsize()
    return x * m.settings.n


CASES = {
    "a ring that is written to": (rotates, {"ring": None, "start": 0}, 3),
    "a counter": (counts, {"n": 0}, 4),
    "a switch": (alternates, {"n": False}, 2),
    "a tensor that grows": (grows, {"kept": None}, 4),
    "a tensor of the first call": (keeps_the_first, {"kept": None}, 2),
    "a table that is made once": (keeps_a_table, {"tables": {}}, 2),
    "a list": (appends, {"parts": []}, 4),
    "an attribute that goes": (removes, {"n": 1}, 2),
    "a list of an object": (stores, {"store": Store()}, 4),
    "a tensor that nobody reads": (notes, {}, 2),
    "a method of an object with slots": (calls, {"call": Slots().add}, 4),
    "a closure": (calls, {"call": closure}, 4),
    "a module in a plain list": (lambda m, x: m.parts[0](x), {"parts": [Total()]}, 2),
    "a dict and a counter": (in_items, {"items": Items(), "words": collections.Counter()}, 4),
    "a list in itself": (in_a_circle, {"circle": ([],)}, 4),
    "the order of keys": (moves_to_the_end, {"n": collections.OrderedDict(a=1, b=2)}, 2),
    "a set and an object that go and come": (to_and_fro, {"seen": set(), "made": None}, 2),
    "objects in a set": (adds_to_objects, {"objects": {Slots()}, "sums": set()}, 4),
    "objects as keys": (adds_to_objects, {"objects": {Slots(): 1}, "sums": set()}, 4),
    "arrays": (
        in_arrays,
        {
            "bytes": bytearray(b"a"),
            "table": numpy.array([(1, 2.0)], dtype=[("n", "i4"), ("x", "f4")]),
            "objects": numpy.array([Slots()], dtype=object),
        },
        4,
    ),
    "a tensor of the host that is written to": (writes_a_table, {"table": torch.zeros(2, 4), "n": 0}, 4),
    "a queue and a namespace": (queues, {"line": queue.Queue, "settings": argparse.Namespace()}, 4),
    "a number of the host": (lambda m, x: x * m.steps.add_(1), {"steps": torch.zeros(())}, 4),
}
MADE = closure, queue.Queue
CASES["a list in itself"][1]["circle"][0].append(CASES["a list in itself"][1]["circle"])


@pytest.mark.parametrize("case", CASES)
def test_each_call_finds_and_leaves_the_attributes_that_pytorchs_would(case, x, session):
    act, attributes, programs = CASES[case]
    eager, ported = (
        Module(act, **{n: v() if any(v is made for made in MADE) else copy.deepcopy(v) for n, v in attributes.items()})
        for _ in range(2)
    )
    ported = torchport.port(ported.eval(), strategy=RULES)
    for number in range(4):
        assert torch.equal(ported(x + number), eager(x + number)), number
    for name in attributes:
        assert hasattr(ported, name) == hasattr(eager, name)
        is_plain = name in ("n", "kept", "tables", "parts", "seen", "steps") and case != "a module in a plain list"
        assert not is_plain or not hasattr(eager, name) or str(getattr(ported, name)) == str(getattr(eager, name))
    assert len(ported.compiled.programs) == programs


def test_a_buffer_that_is_bound_anew_is_a_weight_of_the_next_call(x, session):
    def adds(m, x):
        m.total = m.total + x.sum(0)
        m.count += 1
        return m.total * m.count

    module = Module(adds)
    module.register_buffer("total", torch.zeros(3))
    module.register_buffer("count", torch.tensor(0))
    ported = torchport.port(module.eval(), strategy={**RULES, "weights": RULES["inputs"]})
    for number in (1, 2, 3):
        assert torch.equal(ported(x), number * number * x.sum(0))
    assert len(ported.compiled.programs) == 1
    stacks = {"blocks": {"carries": ["x"]}}
    stacked = torchport.port(Blocks().eval(), strategy={**RULES, "weights": RULES["inputs"], "stacks": stacks})
    with pytest.raises(StackError, match=r"A block of 'blocks' sets its own 'total' when it is called"):
        stacked(x)


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Total(), Total()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_list_of_two_modules_stays_one(x, session):
    parts = []
    ported = torchport.port(Module(shares, parts=parts, part=Module(None, parts=parts)).eval(), strategy=RULES)
    assert [torch.equal(ported(x), n * x) for n in (1, 2)] == [True, True] and len(parts) == 2


def test_what_is_set_between_calls_counts(x, session):
    def scaled(m, x):
        return m.parts[0](x * m.scale * m.part.scales[0]) * getattr(m, "more", 1) * (0 if m.part.training else 1)

    parts = torch.nn.ModuleList([torch.nn.Identity()])
    module = Module(scaled, scale=1.0, part=Module(None, scales=[2.0]), parts=parts).eval()
    ported = torchport.port(module, strategy=RULES)
    assert torch.equal(ported(x), 2 * x)
    ported.scale = 3.0
    ported.part.scales[0] = 4.0
    assert torch.equal(ported(x), 12 * x) and module.scale == 3.0
    ported.more = 2
    assert torch.equal(ported(x), 24 * x)
    ported.parts[0] = torch.nn.Softmax(-1)
    assert torch.allclose(ported(x), (12 * x).softmax(-1) * 2)
    ported.parts[0] = torch.nn.Identity()
    ported.parts[0].register_forward_hook(lambda module, inputs, output: -output)
    assert torch.equal(ported(x), -24 * x)
    ported.part.train()
    assert not ported(x).any()
    with pytest.raises(BadValueError, match=r"'part' is on the devices\. Set it before port, or port the module anew"):
        ported.part = torch.nn.Identity()


def add_to(m, x):
    m.total.add_(x.sum(0))
    return m.other * 1


def test_a_buffer_that_something_else_holds_is_not_written_to(x, session):
    for hold in (lambda m: setattr(m, "other", m.total[:2]), lambda m: m.register_buffer("other", m.total)):
        module = Module(add_to)
        module.register_buffer("total", torch.zeros(3))
        hold(module)
        ported = torchport.port(module.eval(), strategy={**RULES, "weights": RULES["inputs"]})
        with pytest.raises(OperatorError, match="writes to a weight or a buffer of the network"):
            ported(x)


@pytest.mark.parametrize("new", [lambda m, x: None, lambda m, x: torch.cat([m.total, x[0]])], ids=["None", "longer"])
def test_a_buffer_that_gets_another_form_is_refused(new, x, session):
    module = Module(lambda m, x: setattr(m, "total", new(m, x)) or x)
    module.register_buffer("total", torch.zeros(3))
    ported = torchport.port(module.eval(), strategy={**RULES, "weights": RULES["inputs"]})
    with pytest.raises(BadValueError, match="It binds the buffer 'total' to a tensor of another form"):
        ported(x)
    assert module.total.tolist() == [0, 0, 0]


class Appends(torch.nn.Module):
    def forward(self, x, kept=[]):  # noqa: B006
        kept.append(x)
        return sum(kept)


def test_a_list_that_is_a_default_is_kept(x, session):
    ported = torchport.port(Appends().eval(), strategy=RULES)
    try:
        assert [torch.equal(ported(x), n * x) for n in (1, 2, 3)] == [True] * 3
    finally:
        Appends.forward.__defaults__[0].clear()


def test_a_large_table_of_whole_numbers_is_an_argument_of_64_bits(x, session):
    def places(m, x):
        table = torch.arange(400, device=x.device)[:, None] - torch.arange(400, device=x.device)
        return x.sum() + table[x.long()]

    ported = torchport.port(Module(places).eval(), strategy=RULES)
    assert torch.equal(ported(x), places(None, x))
    [program] = ported.compiled._origins.values()
    assert [str(table.dtype) for tables in program.tables for table in tables] == ["int64"]


def test_caches_of_transformers_are_arguments_and_outputs(session):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'torchport[test]'")
    ids = torch.arange(6)[None]
    config = transformers.LlamaConfig(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    eager = transformers.LlamaModel(config).eval()
    ported = torchport.port(copy.deepcopy(eager), strategy={**RULES, "weights": RULES["inputs"]})
    first = [network(ids[:, :4]) for network in (eager, ported)]
    caches = [each.past_key_values for each in first]
    for step in (4, 5):
        after = [n(ids[:, step:][:, :1], cache=c) for n, c in zip((eager, ported), caches, strict=True)]
        torch.testing.assert_close(*(each.last_hidden_state for each in after))
    assert caches[1].get_seq_length() == 6 and after[1].past_key_values is caches[1]


def test_several_threads_call_one_port_and_none_copies_it(x, session):
    ported = torchport.port(Module(lambda m, x: x * 2).eval(), strategy=RULES)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(
            pool.map(lambda n: torch.equal(ported(torch.ones(n % 4 + 1, 3)), torch.full((n % 4 + 1, 3), 2.0)), range(8))
        )
    for act in (copy.deepcopy, pickle.dumps):
        with pytest.raises(BadValueError, match="can be neither copied nor pickled"):
            act(ported)
    with pytest.raises(BadValueError, match=r"'args\.1' is of the type list_iterator, and becomes no constant"):
        ported(x, iter([1]))


LEFT, OWN, VARIABLE, QUEUE = [], threading.local(), contextvars.ContextVar("left"), queue.Queue()


@pytest.mark.parametrize(
    ("leave", "holder"),
    [
        (lambda m, x: LEFT.append(x), r"'LEFT' of the module '.*test_state'"),
        (lambda m, x: LEFT.append(x * 2), r"'LEFT' of the module '.*test_state'"),
        (lambda m, x: setattr(OWN, "left", x * 2), "a dict"),
        (lambda m, x: VARIABLE.set(x * 2), "a hamt_bitmap_node"),
        (lambda m, x: QUEUE.put(x * 2), r"'QUEUE' of the module '.*test_state'"),
        (lambda m, x: setattr(Slots, "left", x), "the class 'Slots'"),
    ],
    ids=["an input", "a list", "a thread", "a context", "a queue", "a class"],
)
def test_a_tensor_that_is_left_in_a_global_is_refused(leave, holder, x, session):
    ported = torchport.port(Module(lambda m, x: (leave(m, x), x)[1]).eval(), strategy=RULES)
    try:
        for _ in range(2):
            with pytest.raises(BadValueError, match=f"It leaves a tensor in {holder}, where"):
                ported(x)
    finally:
        LEFT.clear()
        vars(OWN).clear()
        VARIABLE.set(None)
        QUEUE.queue.clear()
        vars(Slots).get("left", None) is not None and delattr(Slots, "left")


def test_values_that_a_call_makes_are_whole(x, session):
    module = Module(in_made_values).eval()
    ported = torchport.port(Module(in_made_values).eval(), strategy=RULES)
    for number in range(2):
        for each in (module, ported):
            _, (name, pair), device = each(x + number)
            assert (type(name), name, type(pair), pair, device.type) == (Name, "a", Pair, (1, 2), "cpu")
            assert torch.equal(name.kept, x + number) and torch.equal(pair.kept, 2 * (x + number))
            assert each.made[0] is name
    assert len(ported.compiled.programs) == 2


def test_views_among_what_a_call_returns_and_finds_share_memory(x, session):
    ported = torchport.port(Module(lambda m, x: (x[1:], (y := x * 2), y[0], y.t())).eval(), strategy=RULES)
    part, whole, row, turned = ported(x)
    assert part.data_ptr() == x[1:].data_ptr() and row.data_ptr() == turned.data_ptr() == whole.data_ptr()
    whole.zero_()
    assert not row.any() and turned.shape == (3, 2) and torch.equal(part, x[1:])


def keeps_its_buffer(m, x):
    m.kept = getattr(m, "kept", m.total)
    m.kept.add_(x.sum(0))
    return m.kept, m.total[1:], m.kept is m.total


def keeps_the_last(m, x):
    m.last, m.total = m.total, m.total + x.sum(0)
    return m.last, m.total


def writes_and_binds(m, x):
    m.total.add_(1)
    m.total = m.total * 2
    return m.total


@pytest.mark.parametrize("act", [keeps_its_buffer, keeps_the_last, writes_and_binds, lambda m, x: m.part.weight])
def test_weights_and_buffers_that_calls_return_are_the_modules(act, x, session):
    modules = [Module(act, part=torch.nn.Linear(3, 2)).eval() for _ in range(2)]
    for module in modules:
        module.register_buffer("total", torch.zeros(3))
        module.part.requires_grad_(False).load_state_dict(modules[0].part.state_dict())
    modules[1] = torchport.port(modules[1], strategy={**RULES, "weights": RULES["inputs"]})
    calls = [[module(x + n) for n in range(3)] for module in modules]
    torch.testing.assert_close(*calls, rtol=0, atol=0)
    flat = [[t for call in each for t in (call if isinstance(call, tuple) else [call])] for each in calls]
    identities = [[one is other for one in each for other in each] for each in flat]
    assert identities[0] == identities[1]
    flat[1][-1 if act is not keeps_its_buffer else -2].add_(1)
    with pytest.raises(BadValueError, match=r"'(total|part.weight|weight)' is on the devices\. Set it before port"):
        modules[1](x)


def test_attributes_of_tensors_are_kept(x, session):
    def act(m, x):
        m.kept = getattr(m, "kept", x)
        m.kept.calls = getattr(m.kept, "calls", 0) + 1
        y = x * m.kept.calls * x.scale * m.weight.scale
        y.tag = "y"
        return y

    given = [[x.clone() for _ in range(3)] for _ in range(2)]
    modules = [Module(act, weight=torch.nn.Parameter(x, requires_grad=False)).eval() for _ in range(2)]
    for module, tensors in zip(modules, given, strict=True):
        module.weight.scale = 3
        for number, tensor in enumerate(tensors):
            tensor.scale = number
    modules[1] = torchport.port(modules[1], strategy={**RULES, "weights": RULES["inputs"]})
    outputs = [list(map(module, tensors)) for module, tensors in zip(modules, given, strict=True)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert [list(map(vars, each)) for each in outputs] == [[{"tag": "y"}] * 3] * 2
    assert list(map(vars, given[0])) == list(map(vars, given[1]))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda m, x: (setattr(y := x * 2, "tag", [1]), y)[1], "The attribute 'tag' of a tensor is of the type list"),
        (lambda m, x: setattr(m.weight, "tag", 1) or x, "It sets an attribute of a weight"),
        (lambda m, x: (setattr(y := torch.ones(2, device=x.device), "tag", 1), y)[1], "depends on no input"),
    ],
)
def test_attributes_of_tensors_that_a_program_cannot_keep_are_refused(act, words, x, session):
    module = Module(act, weight=torch.nn.Parameter(x)).eval()
    with pytest.raises(BadValueError, match=words):
        torchport.port(module, strategy={**RULES, "weights": RULES["inputs"]})(x)


class Halves(torch.nn.Module):
    """It has the parts of a cache as attributes, too, and writes to a part and to the whole."""

    def __init__(self):
        super().__init__()
        self.whole = torch.zeros(2, 3)
        self.keys, self.values = self.whole

    def forward(self, x, part):
        self.keys.add_(x[0])
        self.whole.mul_(2)
        self.values[1:] = x[1, 1:]
        part.sub_(1)
        return self.whole + self.keys * self.values, x * 1


def test_parts_of_a_tensor_that_are_kept_or_given_beside_it_are_its_memory(x, session):
    modules = [Halves().eval(), torchport.port(Halves().eval(), strategy=RULES)]
    for number in range(3):
        given = [x + number, x + number]
        outputs = [module(one, one.t()[1]) for module, one in zip(modules, given, strict=True)]
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        assert torch.equal(*given) and torch.equal(*(module.whole for module in modules))
        assert all(module.keys.data_ptr() == module.whole.data_ptr() for module in modules)


def keeps_rows(m, x):
    if not hasattr(m, "kept"):
        whole = x * 1
        m.kept, m.same = whole[0], whole[0]
    m.kept.add_(1)
    return m.same * 1


def keeps_parts_of_a_table(m, x):
    if not hasattr(m, "first"):
        table = torch.arange(4.0)
        m.first, m.second = table[1:], table[:2]
    m.first.add_(1)
    return x * m.second.sum()


def adds_to_slices(m, x):
    for number, part in enumerate(m.parts):
        part.add_(x * number)
    return sum(m.parts)


@pytest.mark.parametrize(
    ("act", "attributes"),
    [
        (keeps_rows, {}),
        (adds_to_slices, {"parts": [*torch.zeros(3, 2, 3)]}),
        (lambda m, x: (y := x * 2, y[:, :2], y[:, 1:])[1:], {}),
        (lambda m, x: (x * 2).chunk(3, -1), {}),
        (lambda m, x: (y := x.t() + 1, y[0], y[1:]), {}),
        (lambda m, x: (y := x.t() + 1, y[:2], y[1:])[1:], {}),
        (lambda m, x: (y := x * 2, y.view(torch.int16), y[1].view(torch.int32)), {}),
        (lambda m, x: (y := torch.complex(x, x), y.imag, y.conj()[0]), {}),
        (lambda m, x: (x.view(torch.int32), x), {}),
        (lambda m, x: (m.table[1:], x + m.table), {"table": torch.zeros(3)}),
        (keeps_parts_of_a_table, {}),
        (lambda m, x: x + m.table, {"table": torch.ones(3).expand(2, 3)}),
        (lambda m, x: (x[0].add_(1), x[1].mul_(2))[0] * 1, {}),
    ],
)
def test_parts_of_one_memory_are_as_in_pytorch(act, attributes, x, session):
    modules = [Module(act, **copy.deepcopy(attributes)).eval() for _ in range(2)]
    modules[1] = torchport.port(modules[1], strategy=RULES)
    for number in range(3):
        given = [x + number, x + number]
        outputs = [module(one) for module, one in zip(modules, given, strict=True)]
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        for output in outputs:
            (output if isinstance(output, torch.Tensor) else output[0]).add_(1)
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        assert torch.equal(*given)


@pytest.mark.parametrize(
    "given",
    [
        ({1: 0}, {1.0: 0}, {True: 0}),
        ({1}, {1.0}, frozenset([1.0])),
        (range(0, 3, 2), range(0, 4, 2)),
        (numpy.float64(0.0), numpy.float64(-0.0)),
    ],
    ids=["keys", "items", "ranges", "zeros"],
)
def test_what_is_equal_and_not_the_same_makes_another_program(given, x, session):
    def act(m, x, value):
        number = value.stop if isinstance(value, range) else value if isinstance(value, float) else next(iter(value))
        return x.long() * number if number else x / torch.tensor(float(number))

    ported = torchport.port(Module(act).eval(), strategy=RULES)
    for value in given:
        torch.testing.assert_close(ported(x + 1, value), act(None, x + 1, value), rtol=0, atol=0)


def test_the_caches_of_layers_become_inputs_together(x, session, monkeypatch):
    def adds(m, x):
        for layer in m.layers:
            layer.cache[1:] += x[:1]
            x = x + layer.cache[1] * layer.scale
        return x

    traces = []
    monkeypatch.setattr("torchport.engine.begin_trace", lambda begin=engine.begin_trace: traces.append(1) or begin())
    layers = [Module(None, cache=torch.zeros(2, 3), scale=torch.ones(3) * n) for n in range(4)]
    modules = [Module(adds, layers=torch.nn.ModuleList(copy.deepcopy(layers))).eval() for _ in range(2)]
    modules[1] = torchport.port(modules[1], strategy=RULES)
    for _ in range(2):
        torch.testing.assert_close(*(module(x) for module in modules), rtol=0, atol=0)
    assert len(traces) == 2


def test_weights_are_read_as_the_last_call_has_left_them(x, session):
    def adds(m, x):
        m.total = m.total + x.sum(0)
        m.part.running_mean += 1
        return m.part(x)

    modules = [Module(adds, part=torch.nn.BatchNorm1d(3)).eval() for _ in range(2)]
    for module in modules:
        module.register_buffer("total", torch.zeros(3))
    modules[1] = torchport.port(modules[1], strategy={**RULES, "weights": RULES["inputs"]})
    for _ in range(2):
        torch.testing.assert_close(*(module(x) for module in modules))
        torch.testing.assert_close(*(module.state_dict() for module in modules))
        assert torch.equal(*(module.total for module in modules))
        assert torch.equal(*(module.part.running_mean for module in modules))


def test_an_argument_keeps_its_shape_and_may_be_a_conjugate(x, session):
    ported = torchport.port(Module(lambda m, x: x.unsqueeze_(0) * 1).eval(), strategy=RULES)
    with pytest.raises(BadValueError, match=r"It gives the argument 'args\.0' another shape"):
        ported(x)
    given = torch.complex(x, x + 1).conj()
    assert torch.equal(torchport.port(Module(lambda m, x: x.imag * 1).eval(), strategy=RULES)(given), -x - 1)


def test_data_of_a_tensor_is_exchanged(x, session):
    def act(m, x):
        m.total.data = m.total + x
        y = x * 1
        y.data = m.total * 2
        x.data = y
        y.add_(1)
        return x + y.data

    modules = [Module(act, total=torch.zeros(2, 3)) for _ in range(2)]
    modules[1] = torchport.port(modules[1].eval(), strategy=RULES)
    for number in range(3):
        given = [x + number, x + number]
        assert torch.equal(*(module(one) for module, one in zip(modules, given, strict=True))), number
        assert torch.equal(*given) and torch.equal(*(module.total for module in modules))
    shorter = torchport.port(Module(lambda m, x: setattr(x, "data", x[:1]) or x).eval(), strategy=RULES)
    with pytest.raises(OperatorError, match="gives a tensor the memory of another one"):
        shorter(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda norm: norm.running_mean.add_(1),
        lambda norm: setattr(norm, "running_mean", torch.ones(3)),
        lambda norm: setattr(norm, "weight", torch.nn.Parameter(torch.ones(3))),
        lambda norm: torch.nn.init.ones_(norm.weight),
        lambda norm: norm.add_module("adapter", torch.nn.Linear(3, 3)),
    ],
)
def test_a_weight_that_is_set_outside_of_the_port_is_refused(change, x, session):
    norm = torch.nn.BatchNorm1d(3)
    module = Module(lambda m, x: m.part(x), part=norm).eval()
    ported = torchport.port(module, strategy={**RULES, "weights": RULES["inputs"]})
    ported(x)
    change(norm)
    with pytest.raises(BadValueError, match=r"'[\w.]+' is on the devices\. Set it before port, or port the module"):
        ported(x)
    with pytest.raises(BadValueError, match="A part of the module is ported already"):
        torchport.port(Module(None, part=ported).eval(), strategy=RULES)


def test_a_layer_that_takes_the_place_of_another_is_refused(x, session):
    layers = torch.nn.ModuleList([torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)])
    ported = torchport.port(Module(lambda m, x: m.layers[0](x), layers=layers).eval())
    ported(x)
    for new in (torch.nn.BatchNorm1d(3).eval(), layers[1]):
        layers[0] = new
        with pytest.raises(BadValueError, match=r"'layers\.0\.weight' is on the devices\. Set it before port"):
            ported(x)
    with pytest.raises(BadValueError, match=r"'layers\.0\.weight' is on the devices"):
        ported.load_state_dict(ported.state_dict())


def test_the_state_dict_has_the_names_that_it_has_in_pytorch(x, session):
    module = Module(lambda m, x: m.second(x) * m.table, first=torch.nn.Linear(3, 3), second=torch.nn.Linear(3, 3))
    module.second.weight = module.first.weight
    module.register_buffer("table", torch.ones(3), persistent=False)
    expected = module.state_dict()
    got = torchport.port(module.eval()).state_dict()
    assert [*got] == [*expected] and all(torch.equal(got[name], expected[name]) for name in expected)
    module = Module(lambda m, x: x * m.table)
    module.register_buffer("table", torch.ones(3), persistent=False)
    assert torchport.port(module.eval()).state_dict() == {}


FACTOR = torch.ones(3)
LAZY: dict[int, torch.Tensor] = {}


class Outside(torch.nn.Module):
    """It reads a global, a global table that it fills, and attributes of its class, of which it changes two."""

    tables = [torch.ones(3)]
    scale = 2
    calls = torch.zeros(())

    def forward(self, x):
        LAZY.setdefault(len(x), torch.ones(len(x), 1))
        Outside.calls += 1
        return (
            x * FACTOR.to(x.device) * self.tables[0].to(x.device) * LAZY[len(x)].to(x.device) * self.scale * self.calls
        )


def test_what_is_set_in_a_class_or_a_global_between_calls_counts(x, session):
    ported = torchport.port(Outside().eval())
    expected = 2.0
    for number, change in enumerate(
        (
            lambda: None,
            lambda: FACTOR.mul_(2),
            lambda: Outside.tables.__setitem__(0, Outside.tables[0] * 2),
            lambda: setattr(Outside, "scale", 4),
            lambda: LAZY[2].mul_(2),
        )
    ):
        change()
        assert torch.equal(ported(x), x * expected * 2**number * (number + 1)), number


class Doubled(torch.Tensor):
    """A tensor whose operators are others than PyTorch's."""


def test_tensors_of_other_classes_are_refused(x, session):
    ported = torchport.port(Module(lambda m, x: x * 2).eval())
    with pytest.raises(BadValueError, match="is of the class Doubled, whose operators no program calls"):
        ported(x.as_subclass(Doubled))
    layer = torch.nn.Linear(3, 3)
    layer.weight = torch.nn.Parameter(layer.weight.data.as_subclass(Doubled))
    with pytest.raises(BadValueError, match="'weight' is of the class Doubled"):
        torchport.port(layer.eval())


class Keywords(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_forward_pre_hook(lambda m, a, k: (a, {**k, "n": k.get("n", 1) + len(a)}), with_kwargs=True)

    def forward(self, x, n=1):
        return x * n


def test_hooks_see_which_arguments_are_keywords(x, session):
    ported = torchport.port(Keywords().eval(), strategy=RULES)
    assert torch.equal(ported(x), x * 2) and torch.equal(ported(x=x), x) and torch.equal(ported(x, n=3), x * 4)


def test_functions_of_one_code_share_a_program(x, session):
    ported = torchport.port(Module(lambda m, x, act: act(x)).eval(), strategy=RULES)
    factors = [2, 2, 3]
    assert [torch.equal(ported(x, lambda y, n=n: n * y), n * x) for n in factors] == [True] * 3
    assert [torch.equal(ported(x, (lambda k: lambda y: k * y)(n)), n * x) for n in factors] == [True] * 3
    assert len(ported.compiled.programs) == 4


@pytest.mark.parametrize("made", [lambda: iter([1, 2]), lambda: (n for n in (1, 2))], ids=["iterator", "generator"])
def test_an_iterator_that_a_call_would_advance_is_refused(made, x, session):
    ported = torchport.port(Module(lambda m, x: x * next(m.items), items=made()).eval(), strategy=RULES)
    with pytest.raises(
        BadValueError, match=r"'items' of a Module is a .*, of which a program would take the same item"
    ):
        ported(x)
    ported = torchport.port(Module(lambda m, x: iter([x])).eval(), strategy=RULES)
    with pytest.raises(BadValueError, match="What it returns is a list_iterator, of which"):
        ported(x)


def test_attributes_of_odd_kinds_are_computed_with_or_refused(x, session):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype, PyTorch says in the first call of a process
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    sums = Module(lambda m, x: x + m.table.to_padded_tensor(0.0).sum(), table=nested)
    assert torch.equal(torchport.port(sums.eval(), strategy=RULES)(x), x + 5)
    deep = ()
    for _ in range(500):
        deep = (deep,)
    with pytest.raises(BadValueError, match="tuples in tuples, deeper than Python can follow"):
        torchport.port(Module(lambda m, x: x, deep=deep).eval(), strategy=RULES)(x)
    sparse = Module(lambda m, x: torch.sparse.mm(m.table, x), table=torch.eye(len(x)).to_sparse())
    with pytest.raises(ForeignError, match=r"has the layout torch.sparse_coo; keep it as to_dense\(\)"):
        torchport.port(sparse.eval(), strategy=RULES)(x)


def test_a_hook_that_a_call_registers_stays(x, session):
    def gathers(m, x):
        if not m.is_hooked:
            m.part.register_forward_hook(lambda module, inputs, output: m.kept.append(output))
            m.is_hooked = True
        return m.part(x) * len(m.kept)

    modules = [Module(gathers, is_hooked=False, kept=[], part=torch.nn.Softmax(-1)).eval() for _ in range(2)]
    modules[1] = torchport.port(modules[1], strategy=RULES)
    for n in range(3):
        torch.testing.assert_close(*(module(x + n) for module in modules))
    torch.testing.assert_close(*(module.kept for module in modules))


def test_submodules_that_are_exchanged_in_a_call_are_refused(x, session):
    def exchanges(m, x):
        m.first, m.second = m.second, m.first
        return m.first(x)

    module = Module(exchanges, first=torch.nn.Identity(), second=torch.nn.Softmax(-1)).eval()
    with pytest.raises(BadValueError, match="A call exchanges submodules of a 'Module'"):
        torchport.port(module, strategy=RULES)(x)
    assert isinstance(module.first, torch.nn.Identity)


def test_what_a_call_leaves_in_its_arguments_is_the_callers(x, session):
    def writes(m, x, parts, store):
        parts["more"].append(x * 2)
        parts["first"] = parts["more"][0]
        store.parts.append(x + len(store.parts))
        return sum(store.parts)

    first, given = torch.ones(2, 3), []
    for module in (Module(writes).eval(), torchport.port(Module(writes).eval(), strategy=RULES)):
        more, store = [first], Store()
        outputs = [module(x, {"more": more}, store) for _ in range(3)]
        parts = {"more": more}
        module(x, parts, store)
        assert parts["more"] is more and parts["first"] is first
        given.append([*outputs, *more, *store.parts])
    assert all(map(torch.equal, *given)) and len(given[0]) == len(given[1]) == 12


def test_a_tensor_of_the_callers_is_written_to(x, session):
    ported = torchport.port(Module(lambda m, x, y: (x[:, :1].mul_(3), x + y)[1]).eval(), strategy=RULES)
    given = x.clone().t()
    assert torch.equal(ported(given, x.t()), given + x.t())
    assert torch.equal(given[:, 0], 3 * x[0]) and torch.equal(given[:, 1], x[1])
    with pytest.raises(
        BadValueError, match=r"lies in the memory of another one, or of an attribute\. Pass a clone\(\)"
    ):
        ported(given, given[:, :1])
    with pytest.raises(OperatorError, match="writes to an argument of the network"):
        ported(torch.ones(1, 3).expand(3, 3), x.t().contiguous().mul(2)[:, :1].expand(3, 3))
    kept = torch.ones(3, 2)
    ported.kept = kept[:2]
    with pytest.raises(BadValueError, match="or of an attribute"):
        ported(kept, x.t())


def test_a_call_that_fails_leaves_what_it_found(x, session):
    def fails(m, x):
        m.n, m.kept = m.n + 1, x
        raise ValueError("no")

    ported = torchport.port(Module(fails, n=0).eval(), strategy=RULES)
    with pytest.raises(ForeignError, match="ValueError: no"):
        ported(x)
    assert ported.n == 0 and not hasattr(ported, "kept")


def test_an_argument_is_what_it_is_in_pytorch(x, session):
    ported = torchport.port(Module(lambda m, x, y: x * 2 if x is y else x).eval(), strategy=RULES)
    assert torch.equal(ported(x, x), 2 * x) and torch.equal(ported(x, x.clone()), x)
    ported = torchport.port(Module(lambda m, x: (x.stride(), x.is_contiguous(), x.contiguous())).eval(), strategy=RULES)
    assert ported(x)[:2] == (x.stride(), True) and ported(x.t())[:2] == (x.t().stride(), False)


def flat(m, x):
    try:
        return x.t().view(-1)
    except RuntimeError:
        return x.t().reshape(-1) * 2


def in_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.t()


REFUSED = {
    "an average of whole numbers": (lambda m, x: x.long().mean(), ForeignError, "could not infer output dtype"),
    "a deviation of whole numbers": (lambda m, x: x.long().std(), ForeignError, "only support floating point"),
    "a ReLU of bools": (lambda m, x: torch.relu(x > 1), ForeignError, "not supported for bool"),
    "a product of two dtypes": (lambda m, x: x @ x.t().double(), ForeignError, "float32 and float64"),
    "a difference of bools": (lambda m, x: (x > 1) - (x > 2), ForeignError, "with two bool tensors is not supported"),
    "dropout": (
        lambda m, x: torch.nn.functional.dropout(x),
        OperatorError,
        "draws numbers while the network is traced",
    ),
    "autocast of the host": (in_autocast, HostTensorError, r"torch\.autocast\('cpu'\) casts tensors of the host"),
}


def test_what_pytorch_refuses_is_refused_and_upstream_may_go_on(x, session):
    assert torch.equal(torchport.port(Module(flat).eval(), strategy=RULES)(x), 2 * x.t().reshape(-1))


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_value_is_refused(case, x, session):
    act, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        torchport.port(Module(act).eval(), strategy=RULES)(x)


@pytest.fixture
def x():
    return torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def session():
    with torchport.applied() as session:
        yield session

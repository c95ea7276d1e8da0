"""Weights published in another arrangement: by rules, names and dtypes, as deltas, and what is refused by name."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardopt import checkpoint
from shardopt.checkpoint.rearrange import Drop, Rule, Tie, inverse
from shardopt.checkpoint.rearrange.families import llama3
from shardopt.checkpoint.stream.arranged import Arranged
from shardopt.errors import LayoutError, MismatchError, OptionError, StateError
from shardopt.ranks import Ranks
from shardopt.sharding import PiecesTensor
from tests.support.arranged import RULES, SHAPES, by_hand
from tests.support.streams import copied, delta_bytes, files_of, full_load, named, same_bits, train, zeros_like


def publish(root, weights, rules, step=1, **options):
    """Publishes one step; returns its place."""
    with checkpoint.Publisher(root, rearrange=rules, durable=False, **options) as publisher:
        return publisher.publish(step, weights).result().url


def names_in(url):
    with checkpoint.open(url) as reader:
        return sorted(reader.manifest.tensors)


def in_groups(w):
    groups = w.reshape(4, 3, 25, 70)
    return {"q": groups[:, :2].reshape(200, 70), "k": groups[:, 2].reshape(100, 70)}


KINDS = {
    "split": (
        Rule("w", ("q", "k"), "(g r+1 d) i -> (g r d) i, (g d) i", {"g": 4, "d": 25, "r": 2}),
        in_groups,
    ),
    "fuse": (Rule(("w", "x"), "wx", "o i, p i -> o+p i"), lambda w, x: {"wx": torch.cat([w, x])}),
    "stack": (Rule("e.{n}", "e", "o i -> n o i"), lambda **e: {"e": torch.stack([*e.values()])}),
    "unstack": (Rule("w", "e.{n}", "(n o) i -> o i", {"o": 150}), lambda w: {"e.0": w[:150], "e.1": w[150:]}),
    "transpose": (Rule("w", "t", "i o -> o i"), lambda w: {"t": w.t()}),
    "permute": (
        Rule("w", "p", "(h half two) i -> (h two half) i", {"h": 5, "two": 2}),
        lambda w: {"p": w.reshape(5, 30, 2, 70).transpose(1, 2).reshape(300, 70)},
    ),
    "reshape": (Rule("w", "r", "(a b) i -> a b i", {"a": 3}), lambda w: {"r": w.reshape(3, 100, 70)}),
    "flatten": (Rule("w", "f", "a b -> (a b)"), lambda w: {"f": w.flatten()}),
    "pad": (Rule("w", "w", "v i -> v+_more i", {"_more": 9}), lambda w: {"w": torch.cat([w, torch.zeros(9, 70)])}),
    "slice": (Rule("w", "w", "v+_more i -> v i", {"_more": 9}), lambda w: {"w": w[:-9]}),
    "rename": (Rule("w", "v"), lambda w: {"v": w}),
    "drop": (Drop("x"), lambda w, x: {"w": w}),
    "tie": (Tie("w", "v"), lambda w: {"w": w, "v": w}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_rule_is_published_exactly_and_followed_by_deltas(tmp_path, kind):
    rule, hand = KINDS[kind]
    names = {"fuse": "wx", "drop": "wx", "stack": ["e.0", "e.1", "e.2"]}.get(kind, "w")
    weights = {name: torch.randn(300, 70) for name in names}
    app = None
    with checkpoint.Publisher(tmp_path, rearrange=[rule], durable=False) as publisher:
        for step in (1, 2, 3):
            train(weights, step)
            url = publisher.publish(step, weights).result().url
            expected = hand(**{name.replace("e.", "e"): each for name, each in weights.items()})
            assert names_in(url) == sorted(expected)
            if app is None:
                app = zeros_like(expected)
                follower = checkpoint.Follower(tmp_path, app)
            report = follower.update()
            assert same_bits(app, expected) and same_bits(full_load(url, app), expected)
            if step > 1:
                assert report.whole <= (kind == "pad")  # zeros, whose box is small
                assert 0 < delta_bytes(tmp_path, step) < sum(each.nbytes for each in weights.values()) / 10


def test_rules_publish_what_they_would_make_of_a_plain_publication(tmp_path):
    """So a rule can be moved from the followers to the publisher, with the same meaning of names."""
    weights = {f"module.{name}": torch.randn(shape) for name, shape in SHAPES.items()}
    arranged, plain = publish(tmp_path / "arranged", weights, RULES), publish(tmp_path / "plain", weights, [])
    expected = {f"module.{name}": each for name, each in by_hand({k[7:]: v for k, v in weights.items()}).items()}
    assert names_in(arranged) == sorted(expected)
    assert same_bits(full_load(arranged, expected), expected)
    assert same_bits(full_load(plain, expected, rearrange=RULES), expected)


def test_what_was_published_is_read_back_by_the_inverse_rules(tmp_path):
    rules = [rule for rule in RULES if not isinstance(rule, Drop | Tie)]
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    url = publish(tmp_path, weights, rules)
    assert same_bits(full_load(url, weights, rearrange=inverse(rules)), weights)


def test_a_convert_of_a_step_has_the_served_names_and_shapes(tmp_path):
    weights = {"up": torch.randn(30, 20), "experts": torch.randn(2, 9, 8)}
    rules = [Rule("up", "mlp.up.weight", "i o -> o i"), Rule("experts", "mlp.{e}.weight", "e i o -> o i")]
    checkpoint.convert(publish(tmp_path / "root", weights, rules), tmp_path / "plain", "huggingface")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    expected = {"mlp.up.weight": weights["up"].t(), **{f"mlp.{e}.weight": weights["experts"][e].t() for e in (0, 1)}}
    assert same_bits(found, expected)


def test_only_what_changes_its_order_within_a_dimension_is_copied_and_its_memory_is_kept():
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    own = {each.untyped_storage().data_ptr() for each in weights.values()}
    arranged, copies = Arranged(RULES), []
    for _ in range(2):
        published = arranged.of(Ranks(None), weights)
        pieces = {name: each.tensors for name, each in published.items() if isinstance(each, PiecesTensor)}
        apart = {
            name: [each for each in of if each.untyped_storage().data_ptr() not in own] for name, of in pieces.items()
        }
        assert [each.untyped_storage().nbytes() for each in apart.pop("embed_tokens.weight")] == [4]  # its zeros
        copies.append({name: [each.data_ptr() for each in of] for name, of in apart.items() if of})
    assert copies[0] == copies[1] and len(pieces) == 2 + 2 * 16
    parts = [f"{each}_proj.{x}" for each in "qkv" for x in ("bias", "weight")]
    assert sorted(copies[0]) == sorted(f"h.{n}.{each}" for n in range(2) for each in ["pairs", "rotary", *parts])
    assert {len(of) for of in pieces.values()} == {1, 2, 3}  # of the padded, and of the stacked


def test_weights_that_came_while_the_program_was_interrupted_are_not_taken_for_those_before(monkeypatch):
    arranged = Arranged([Rule("w{n}", "v{n}", "i o -> o i")])
    assert [*arranged.of(Ranks(None), {"w0": torch.ones(2, 3)})] == ["v0"]

    def interrupted(*unused, warns=False):
        if not warns:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shardopt.checkpoint.stream.arranged.made", interrupted)
        arranged.of(Ranks(None), {"w1": torch.ones(2, 3)})
    assert [*arranged.of(Ranks(None), {"w1": torch.ones(2, 3)})] == ["v1"]


def test_names_are_rearranged_before_they_are_renamed_as_in_a_load(tmp_path):
    weights = {"layers.0.qkv": torch.randn(60, 70)}
    rules = [Rule("layers.{n}.qkv", ("layers.{n}.q", "layers.{n}.kv"), "q+k i -> q i, k i", {"q": 40})]
    url = publish(tmp_path, weights, rules, rename={r"^layers\.": "h.", r"q$": "query", "qkv": "never"})
    assert names_in(url) == ["h.0.kv", "h.0.query"]
    with checkpoint.open(url) as reader:
        assert torch.equal(reader.read("h.0.query"), weights["layers.0.qkv"][:40])


def test_weights_are_cast_before_they_are_rearranged_and_compared(tmp_path):
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    with checkpoint.Publisher(tmp_path, rearrange=RULES, dtype=torch.bfloat16, durable=False) as publisher:
        publisher.publish(1, weights).result()
        for each in weights.values():
            each.mul_(1 + 2e-7)  # which bf16 rounds away, nearly everywhere
        expected = by_hand({name: each.bfloat16() for name, each in weights.items()})
        url = publisher.publish(2, weights).result().url
    assert same_bits(full_load(url, expected), expected)
    assert sum(each.stat().st_size for each in files_of(tmp_path, 2)) < sum(e.nbytes for e in expected.values()) / 4


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight


TWO = [Rule("embed.weight", "in.weight", "v i -> i v"), Rule("head.weight", "out.weight", "v i -> i v")]


@pytest.mark.parametrize("of", [lambda model: model, lambda model: model.state_dict()], ids=["module", "state_dict"])
def test_tied_weights_are_stored_once_and_under_both_new_names(tmp_path, of):
    model = Tied()
    url = publish(tmp_path, of(model), TWO)
    expected = {"in.weight": model.embed.weight.t(), "out.weight": model.embed.weight.t()}
    assert same_bits(full_load(url, expected), expected)
    with checkpoint.open(url) as reader:
        assert reader.manifest.tensors["out.weight"].tied_to == "in.weight"


def test_a_reversed_tie_leaves_out_the_second_name_of_a_tied_weight(tmp_path):
    tie = Tie("embed.weight", "head.weight").inverse()
    url = publish(tmp_path, Tied(), [tie, TWO[0]])
    assert names_in(url) == ["in.weight"]


def test_a_family_of_models_is_published_under_the_names_of_hugging_face(tmp_path, caplog):
    theirs = llama3(4, 2, tied=True)
    shapes = {"tok_embeddings": (50, 32), "norm": (32,), "output": (50, 32)}
    for name, shape in (("wq", (32, 32)), ("wk", (16, 32)), ("wv", (16, 32)), ("wo", (32, 32))):
        shapes[f"layers.0.attention.{name}"] = shape
    for name, shape in (("w1", (48, 32)), ("w2", (32, 48)), ("w3", (48, 32))):
        shapes[f"layers.0.feed_forward.{name}"] = shape
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    with caplog.at_level(logging.WARNING):
        url = publish(tmp_path, weights, inverse(theirs))
    assert "attention_norm" in caplog.text and "wq" not in caplog.text  # which this model lacks
    app = zeros_like(weights)
    checkpoint.load(url, app, rearrange=theirs)
    assert same_bits(app, weights) and "model.layers.0.self_attn.q_proj.weight" in names_in(url)


@pytest.mark.parametrize("later", [
    {"e.0": (40, 30), "e.1": (40, 30), "e.2": (40, 30), "a": (8, 30), "b": (24, 30)},
    {"e.0": (20, 30), "e.1": (20, 30), "a": (8, 30), "b": (24, 30)},
    {"e.0": (40, 30), "e.1": (40, 30), "a": (4, 30), "b": (24, 30)},
], ids=["another expert", "smaller experts", "another place of the same tensor"])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_weights_in_a_later_step_are_rearranged_as_these(tmp_path, later, dtype):
    def pairs(tensor):
        return tensor.reshape(2, -1, 30).transpose(0, 1).reshape(tensor.shape)

    rules = [
        Rule("e.{n}", "e", "o i -> n i o"),
        Rule(("a", "b"), "ab", "(two x) i, (two y) i -> (x two)+(y two) i", {"two": 2}),
    ]
    first = {"e.0": (40, 30), "e.1": (40, 30), "a": (8, 30), "b": (24, 30)}
    with checkpoint.Publisher(tmp_path, rearrange=rules, durable=False) as publisher:
        for step, shapes in enumerate((first, first, later, first), 1):
            weights = {n: torch.randn(s).to(dtype if step == 3 else torch.float32) for n, s in shapes.items()}
            url = publisher.publish(step, weights).result().url
            experts = [each.t() for name, each in weights.items() if name[0] == "e"]
            expected = {"e": torch.stack(experts), "ab": torch.cat([pairs(weights["a"]), pairs(weights["b"])])}
            assert same_bits(full_load(url, expected), expected)


def test_a_step_that_is_refused_leaves_the_publisher_as_it_was(tmp_path):
    weights = {"w": torch.randn(30, 40)}
    with checkpoint.Publisher(tmp_path, rearrange=[Rule("w", "t", "i o -> o i")], durable=False) as publisher:
        publisher.publish(1, weights).result()
        for _ in range(2):
            with pytest.raises(MismatchError, match=r"w: found the shape \[30\]"):
                publisher.publish(2, {"w": torch.randn(30)})
        url = publisher.publish(2, weights).result().url
    assert same_bits(full_load(url, {"t": torch.zeros(40, 30)}), {"t": weights["w"].t()})


def ones(**shapes):
    return {name.replace("_", "."): torch.ones(shape) for name, shape in shapes.items()}


JOIN = Rule(("q", "k"), "qk", "q i, k i -> q+k i")
STACK = Rule("e.{n}", "e", "o i -> n o i")
GROUPS = Rule("w", ("q", "k"), "(g r+1) i -> (g r) i, g i", {"g": 2})


@pytest.mark.parametrize(
    ("weights", "rules", "match"),
    [
        (ones(w=(4, 6)), [Rule("v", "u")], r"the rule v -> u: found no weight of that name; required one at least"),
        (ones(w=(4, 6)), [Tie("v", "u")], r"the tie v = u: found no weight of that name"),
        (ones(w=(4, 6)), [Drop("v")], r"dropping v: found no weight of that name"),
        (ones(a=(4,), b=(4,)), [Rule("a", "c"), Rule("b", "c")], r"c: found a and b; required one for each name"),
        (ones(a=(4, 2), b=(4,)), [Rule("a", "b", "i o -> o i")], r"b: found b and a; required one for each name"),
        (ones(w=(4, 6)), [Rule("w", "v", "(a b) i -> (b a) i", {"a": 3})], r"w: found the shape \[4, 6\].*\{'a': 3\}"),
        (ones(w=(9, 6)), [GROUPS], r"w: found the shape \[9, 6\]; required one that its axes make with \{'g': 2\}"),
        (ones(w=(9, 6)), [Rule("w", ("q", "k"), "q+k i -> q i, k i")], r"w: found no size of k, q"),
        (ones(q=(9, 6)), [JOIN], r"k: found 0 that there are"),
        (ones(e_0=(2, 3), e_2=(2, 3)), [STACK], r"e.\*: found 2 that there are; required 3 of them"),
        ({"q": torch.ones(2, 3), "k": torch.ones(2, 3).half()}, [JOIN], "k: found float16; required float32"),
        (ones(a=(2, 3), b=(2, 3)), [Tie("a", "b").inverse()], r"b: found another tensor than a.*to the followers"),
    ],
)
def test_rules_that_do_not_fit_the_weights_are_refused_by_name(tmp_path, weights, rules, match):
    with pytest.raises(MismatchError, match=rf"(?s)nothing was published.*(?:{match})") as raised:
        publish(tmp_path, weights, rules)
    assert raised.value.code == "bad-rules" and not list(tmp_path.iterdir())


def test_a_name_that_renaming_takes_twice_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"x: found a.0 and a.1"):
        publish(tmp_path, {"w": torch.ones(2, 3)}, [Rule("w", "a.{n}", "n i -> i")], rename={r"a\.\d": "x"})


def test_a_weight_without_boxes_or_memory_is_refused_where_a_rule_names_it(tmp_path):
    given_back = torch.ones(40, 30)
    given_back.untyped_storage().resize_(0)
    for weight, error, match in (
        (torch.ones(3, 4).to_sparse(), LayoutError, "w: found torch.sparse_coo"),
        (given_back, StateError, "w: found a tensor whose memory was given back"),
    ):
        with pytest.raises(error, match=match):
            publish(tmp_path, {"w": weight}, [Rule("w", "t", "i o -> o i")])


def test_a_scalar_and_a_tensor_without_elements_are_published_as_they_are(tmp_path):
    weights = {"scale": torch.tensor(3.0), "none": torch.ones(0, 4), "w": torch.ones(2, 3)}
    rules = [Rule("scale", "s"), Rule("none", "n", "a b -> b a"), Rule("w", "w", "a b -> b a")]
    url = publish(tmp_path, weights, rules)
    expected = {"s": weights["scale"], "n": torch.ones(4, 0), "w": torch.ones(3, 2)}
    assert same_bits(full_load(url, expected), expected)


def test_publishing_does_not_change_the_weights(tmp_path):
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    before = copied(weights)
    publish(tmp_path, weights, RULES)
    assert same_bits(named(weights), before)

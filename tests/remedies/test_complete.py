"""Every remedy that names a call or an argument has a case that follows it, or stands here with what reaches it."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.remedies.collected import NAMES_A_CALL, VARIES, pattern, remedies

STEPS = "a step, its gradients or its scaler reach it, and no load"
ISLANDS = "the loop of islands reaches it, on several ranks"
RANKS = "ranks that disagree reach it: tests/distributed and tests/unit/checkpoint/converting/test_reshard.py"
LINE = "a line of the log, or a part of a message, and no remedy"
ELSEWHERE = {
    r"optim/(backward|scaler|gradients/|local/)": STEPS,
    r"optim/(islands|semi_sync)/": ISLANDS,
    r"optim/averages/averaging.py": "asks for averages in a module, and no load",
    r"checkpoint/saving/planning/tied.py": RANKS,
    r"algorithms/low_precision/optimizer.py": "a class of tensors that is somebody else's, on several ranks",
    r"checkpoint/run/options.py": "a Manager that is made reaches it, and no load",
    r"checkpoint/run/root.py": LINE,
    r"checkpoint/loading/other_names.py": "tests/unit/checkpoint/loading/test_other_names.py follows the rule",
    r"checkpoint/rearrange/row_state.py": "tests/unit/checkpoint/loading/test_row_state.py follows it",
    r"sharding/pieces_tensor.py": "arithmetic on a stand-in for a shard, which no load does",
    r"checkpoint/sources/quantized.py": "needs a model of a hub; tests/unit/checkpoint/sources/test_quantized.py",
}
TEXTS = {
    "take a step with rate 0 before": "tests/unit/checkpoint/loading/test_lost_wrappers.py",
    "a start by restore(app, step=…) resumes it": "tests/unit/checkpoint/run/test_stopping.py follows it",
    "load_state_dict(..., convert_state=True) of another": "tests/numerics/test_low_precision_follows.py",
    "checkpoint.load(…, app, rename=…": "tests/unit/checkpoint/loading/test_rename_left_in_script.py",
    "give one of them memory of its own": "tests/unit/checkpoint/loading/test_overlapping.py",
    "wait for it: result() of what": "tests/unit/checkpoint/saving/test_saves_of_other_runs.py follows it",
    "end `with ema.swap():` before": "tests/unit/optim/test_averaging.py",
    "never broadcast. Or begin without it": "tests/unit/checkpoint/loading/torchs/test_resized.py follows it",
    "make the averages again where the model changes": "tests/unit/optim/test_averaging.py follows it",
    ', pass select=r"[^"]*"; |, or': "finds what a call without `select` leaves out of remedies",
    "if the run added a group for it": "tests/unit/checkpoint/loading/test_load_choices.py follows it",
    "outside of `with ema.swap():`": "tests/unit/optim/test_averaging.py",
    "for state in 8 bits pass shardopt.keyed": "tests/unit/optim/test_keyed.py",
    "state_dict() gave a": "what was found, and no remedy",
    "use as many ranks; or keep what is there": "tests/integrations/test_torchdata.py follows it",
    "options of the checkpoint replace": "tests/remedies/test_optimizers.py reads the line",
    "To go on from those of the groups, make it again": "tests/unit/optim/test_schedule_rates.py follows it",
    "to the rate of the schedule, and call save_param": "tests/unit/optim/test_schedule_rates.py follows it",
    "an earlier load or outer step did not end well": "tests/unit/runtime/test_partial_loads.py follows it",
    "call update() once before the load": "tests/unit/optim/test_averaging.py follows it",
    "run the code of the publisher here": "tests/unit/checkpoint/loading/test_versions.py follows it",
    "where it is cut give each rank two rows": "tests/unit/sharding/test_traceable.py",
    "resumes from what was saved since, and begins": "tests/unit/checkpoint/run/test_restore.py follows it",
    "loaded with strict=False from another algorithm": LINE,
    "is rounded at random from here on": LINE,
    "of the app only what select=": LINE,
    'with rounding="nearest": a step changes': "tests/remedies/test_calls.py reads the line",
    "of the dense modules, each by itself": "tests/unit/optim/test_averaging.py follows it",
    "and set the options of the groups in the code": "tests/unit/checkpoint/loading/torchs/test_within.py follows it",
    "an axis has a name, and its size": "tests/remedies/test_load.py: a ValueError",
}


@cache
def followed() -> list[str]:
    """The remedies that cases follow: the texts that they hold, of which `refused` gets one."""
    texts = []
    for path in Path(__file__).parent.glob("test_*.py"):
        if path != Path(__file__):
            tree = ast.parse(path.read_text())
            texts += [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            texts += [_text(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    return [text for text in texts if isinstance(text, str) and (text.count(" ") > 1 or NAMES_A_CALL.search(text))]


def _text(node: ast.JoinedStr) -> str:
    return "".join(str(part.value) if isinstance(part, ast.Constant) else VARIES for part in node.values)


def is_followed(remedy: str) -> bool:
    return any(pattern(text).search(remedy) or pattern(remedy).search(text) for text in followed())


def reached_otherwise(remedy: str, where: str) -> bool:
    return any(re.match(each, where) for each in ELSEWHERE) or any(each in remedy for each in TEXTS)


def test_every_remedy_is_followed():
    lacking = [
        f"{where}: {remedy}"
        for remedy, where in remedies().items()
        if not is_followed(remedy) and not reached_otherwise(remedy, where)
    ]
    assert not lacking, "follow what they advise in a case here:\n" + "\n".join(lacking)


def test_what_is_reached_otherwise_is_there():
    for each in ELSEWHERE:
        assert any(re.match(each, where) and not is_followed(text) for text, where in remedies().items()), each
    for each in TEXTS:
        assert any(each in text for text in remedies()), each

"""Wrote the golden checkpoint of torch's optimizers by position, as versions before 0.4 had them; it is not made anew.

python -m tests.golden.make_torch_positions
"""

from pathlib import Path

from shardopt import checkpoint
from tests.golden.state import step_torch_optimizers, torch_optimizers

if __name__ == "__main__":
    app = torch_optimizers()
    step_torch_optimizers(app)
    checkpoint.save(Path(__file__).parent / "torch_positions", app)

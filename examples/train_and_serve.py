"""Train a policy on samples that other processes draw from its newest weights: on-policy learning, in two jobs.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # for --max-restarts: see docs/surviving.md
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_and_serve.py train
    torchrun --standalone --nproc-per-node 3 --max-restarts 3 examples/train_and_serve.py serve

The trainers hold the weights in shards of `fully_shard`, and publish them after each step. The samplers hold them
tensor parallel, follow what is published, and write samples into a folder. launch/demo_stream.sh runs both, and kills a
rank of each.

The weights are in bf16. Large models are trained so at a learning rate of about 1e-5: most updates are then rounded
away, and few weights change in a step. This one is small and has to learn within thirty steps: at 2e-3. So most of its
weights change in each step.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import policy
import torch
import torch.distributed as dist
from spool import Sample, Spool, note
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

import shardopt
from shardopt import checkpoint

BATCH = 64
MOST_STEPS_OLD = 3
ANCHOR_EVERY, SAVE_EVERY = 8, 8
IDLE_SECONDS = 0.02
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))  # how often torchrun has started this job again


class Trainer:
    """The ranks that train, with what they resume from. All calls are collective.

    Args:
        root: of the run.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.spool = root, Spool(root)
        self.model = policy.for_training(init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = shardopt.keyed("adamw", self.model.named_parameters(), lr=2e-3, weight_decay=0.0)
        self.app: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        self.manager = checkpoint.Manager(root / "checkpoints", every=SAVE_EVERY, keep=2)
        self.manager.restore(self.app)
        self.publisher = checkpoint.Publisher(root / "weights", anchor_every=ANCHOR_EVERY)
        self.published: dict[int, tuple[str, float]] = {}  # by step: the hash of its weights, and when
        self.publish()  # also of a step that is resumed from: what was published after it is of a run that is lost

    def publish(self) -> None:
        """Publishes the weights, and notes their hash before anybody can follow them."""
        step, weights = self.app["step"], policy.hash_of_weights(self.model)
        self.published[step] = weights, time.time()
        if dist.get_rank() == 0:
            note(self.root, "published", step=step, weights=weights, life=LIFE)
        self.publisher.publish(step, self.model)

    def turn(self) -> None:
        """Takes a step on a batch of samples, and publishes what came of it."""
        words = torch.empty(BATCH, policy.LENGTH + 1, dtype=torch.int64)
        samples: list[Sample] = []
        dropped = 0
        if dist.get_rank() == 0:
            samples, dropped = self._samples()
            words = torch.tensor([sample.letters for sample in samples])
        dist.broadcast(words, 0)
        rewards = policy.score(words).mean(dim=1)
        advantages = (rewards - rewards.mean()) * policy.LENGTH
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        logits = self.model(words[mine, :-1]).float()
        logged = torch.log_softmax(logits, dim=-1).gather(2, words[mine, 1:, None]).squeeze(2)
        (-(advantages[mine, None] * logged).mean()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if dist.get_rank() == 0:
            self._note(samples, dropped, float(rewards.mean()), policy.text_of(words[-1]))
        self.app["step"] += 1
        self.publish()
        self.manager.save(self.app["step"], self.app)

    def _samples(self) -> tuple[list[Sample], int]:
        """Returns a batch of fresh samples, once there are so many, and how many were dropped before."""
        fresh: list[Sample] = []
        dropped = 0
        while len(fresh) < BATCH:
            waiting = self.spool.waiting()
            if not waiting:
                time.sleep(IDLE_SECONDS)
            for name in waiting[: BATCH - len(fresh)]:
                sample = self.spool.read(name)
                is_known = self.published.get(sample.step, ("", 0.0))[0] == sample.weights  # and of no run that is lost
                is_fresh = is_known and sample.step >= self.app["step"] - MOST_STEPS_OLD
                self.spool.take(name, is_fresh)
                if is_fresh:
                    fresh.append(sample)
                else:
                    dropped += 1
        return fresh, dropped

    def _note(self, samples: list[Sample], dropped: int, reward: float, text: str) -> None:
        now, step = time.time(), self.app["step"]
        note(
            self.root,
            "batches",
            step=step + 1,
            life=LIFE,
            reward=reward,
            text=text,
            steps_old=[step - sample.step for sample in samples],
            seconds_old=[now - self.published[sample.step][1] for sample in samples],
            dropped=dropped,
            samples=[sample.name for sample in samples],
        )

    def close(self) -> None:
        """Waits for what is written."""
        self.publisher.close()
        self.manager.close()


class Sampler:
    """The ranks that write samples together. All calls are collective.

    Args:
        root: of the run.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.spool = root, Spool(root)
        self.model = policy.for_serving(init_device_mesh("cpu", (dist.get_world_size(),)))
        self.follower = checkpoint.Follower(root / "weights", self.model)
        torch.manual_seed(time.time_ns())

    def turn(self) -> None:
        """Takes over the newest weights, and writes samples from them if few wait.

        Ranks that serve together update between two batches. In a thread, one could wait for the update while another
        waits for it in a collective of the model.
        """
        report = self.follower.update()
        if report is not None and dist.get_rank() == 0:
            number = {name: getattr(report, name) for name in ("step", "previous", "bytes_read", "whole", "parts")}
            seconds = {name: getattr(report, name) for name in ("seconds", "pause_seconds", "age_seconds")}
            note(self.root, "updates", life=LIFE, **number, **seconds)
        has_room = torch.tensor([self.follower.step is not None and len(self.spool.waiting()) < BATCH])
        dist.broadcast(has_room, 0)
        if not has_room:
            time.sleep(IDLE_SECONDS)
            return
        with self.follower.serving() as step:
            words = policy.write_words(self.model, BATCH)
            weights = policy.hash_of_weights(self.model)
        if dist.get_rank() == 0:
            self.spool.put(step, weights, words.tolist())


def train(root: Path, steps: int) -> None:
    """Trains until so many steps are done. Every rank calls it."""
    (root / "done").unlink(missing_ok=True)  # of fewer steps
    trainer = Trainer(root)
    while trainer.app["step"] < steps:
        trainer.turn()
    trainer.close()
    (root / "done").touch()


def serve(root: Path) -> None:
    """Writes samples until training is done. Every rank calls it."""
    sampler, is_done = Sampler(root), torch.tensor([False])
    while not is_done:
        sampler.turn()
        is_done = torch.tensor([(root / "done").exists()])
        dist.broadcast(is_done, 0)


@record  # so that torchrun's report has the traceback of the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("train", "serve"))
    parser.add_argument(
        "--out", type=Path, default=Path("out/train-and-serve"), help="a folder, the same for both jobs"
    )
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if options.role == "train":
        train(options.out, options.steps)
    else:
        serve(options.out)
    dist.barrier()  # a rank that leaves while another still talks to it aborts that one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

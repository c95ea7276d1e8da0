"""Rules for models whose tensors Hugging Face names and arranges otherwise than others do."""

from shardopt.checkpoint.rearrange.families.deepseek import deepseek
from shardopt.checkpoint.rearrange.families.gpt2 import gpt2
from shardopt.checkpoint.rearrange.families.llama3 import llama3
from shardopt.checkpoint.rearrange.families.qwen3 import qwen3

__all__ = ["deepseek", "gpt2", "llama3", "qwen3"]

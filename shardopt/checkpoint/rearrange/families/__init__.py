"""Rules for models whose tensors Hugging Face names and arranges differently."""

from shardopt.checkpoint.rearrange.families.deepseek import deepseek as deepseek
from shardopt.checkpoint.rearrange.families.gpt2 import gpt2 as gpt2
from shardopt.checkpoint.rearrange.families.llama3 import llama3 as llama3
from shardopt.checkpoint.rearrange.families.qwen3 import qwen3 as qwen3
from shardopt.runtime.exports import offer as _offer

_offer(__name__)

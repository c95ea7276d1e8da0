"""Write a text as uint16 tokens, one after another: its bytes, where a real tokenizer has the numbers of its words.

    python examples/tokenise.py out/tokens.bin [URL]

The text is at any URL that fsspec opens; without one it is the text that CPython ships.
"""

import sys
from pathlib import Path

import numpy as np
from common import read_text


def main(path: str, url: str = "") -> None:
    """Reads the text at `url` and writes its tokens to `path`."""
    tokens = np.frombuffer(read_text(url), dtype=np.uint8).astype(np.uint16)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    tokens.tofile(path)
    print(f"{len(tokens):,} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])

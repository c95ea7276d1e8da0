"""Signatures of functions and classes of a program's own, without a look at what their annotations mean.

From Python 3.14 on `inspect.signature` evaluates annotations, of which some name what is imported for type checking
alone.
"""

import inspect
import sys
from functools import partial

if sys.version_info >= (3, 14):
    from annotationlib import Format

    signature = partial(inspect.signature, annotation_format=Format.STRING)
else:
    signature = inspect.signature

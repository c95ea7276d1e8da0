"""The report of a run and a checkpoint as one HTML file: `shardopt report`. Imported by nobody but the shell.

gathering.py → runs.py, tensors.py, changes.py, findings.py        one document, which `--json` prints
html.py → page/                                                    the document as a page
"""

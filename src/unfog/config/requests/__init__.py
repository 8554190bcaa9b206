"""One request dataclass for each command, in the module of its name. Field names are the flags.

The strings under fields are the text of `--help`; indented lines of a class docstring are its examples. The commands
that train share `train`, those that look ahead at a run `plan`, and those that show runs `runs`.
"""

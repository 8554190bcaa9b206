"""One module for each command, `unfog X`: it parses, calls and prints, and imports no torch.

The work is a function of the layers below, such as `runs.doctor.doctor`, which Python calls too. Text for the terminal
alone is made here: the frames of `watch`, the questions of `init`, the batch file of `slurm`.
"""

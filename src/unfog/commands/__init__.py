"""One module for each command, `unfog X`: `main` takes the parsed request, calls the work and prints the result.

The work is a function of the layers below, such as `runs.doctor.doctor`, which Python calls too. Only what the command
line alone has is here: the frames of `watch`, the questions of `init`, the batch file of `slurm`, and the folder of
images that `sample` writes. No module here imports torch itself.
"""

"""Whole runs: choices made, parts built, trained, resumed, sampled. Sits on all other layers; knows no command line."""

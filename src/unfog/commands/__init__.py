"""One module for each command, `unfog X`: what it does once its request is parsed."""

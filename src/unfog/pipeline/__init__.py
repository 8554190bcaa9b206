"""Turn a configuration into live objects: data, network, objective, samples and image files."""

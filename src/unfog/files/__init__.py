"""Files and folders: safe reads and writes, locks, seals and the folder of caches."""

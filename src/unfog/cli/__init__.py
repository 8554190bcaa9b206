"""The command line: parse, call, and turn errors into a line and an exit status. Imports torch only once it must."""

"""Commands in the process of the tests."""

import pytest

from unfog.cli.main import main


def exit_status(*words: object) -> int:
    """Run `unfog WORDS` and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)

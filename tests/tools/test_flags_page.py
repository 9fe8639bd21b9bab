"""docs/flags.md says what the declarations say."""

from megatron.run.foreign.answers import ANSWERS
from megatron.run.topics import DECLARED
from tools.flags_page import PAGE, page


def test_the_page_is_current() -> None:
    """Else: python tools/flags_page.py."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_the_page_has_every_flag() -> None:
    text = page()
    for option in (*DECLARED, *ANSWERS.exact):
        assert f"`{option}`" in text or f"`{option} " in text

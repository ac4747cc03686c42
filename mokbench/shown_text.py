"""Text of others in pages and in GitHub markdown: nothing in it acts, and nothing hides."""

# C0 have pictures of their own in Unicode; tab and line ends are layout. The rest has one for all.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n\r"}
# Marks of the direction of writing show what is behind them in another order than it has.
_TURNS = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_VISIBLE = _PICTURES | dict.fromkeys((*range(0x7F, 0xA0), *_TURNS), 0xFFFD)


def visible(text: str) -> str:
    """Replace control characters (ESC, BEL, NUL, RLO) by what shows that they are there."""
    return text.translate(_VISIBLE)


def escaped(text: str) -> str:
    """Text as GitHub markdown shows it: no table cell, link, mention or tag comes out of it."""
    for special in "\\|*_`<>[]~&":
        text = text.replace(special, f"\\{special}")
    return " ".join(visible(text).splitlines()).replace("@", "@\u200b")

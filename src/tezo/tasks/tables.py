"""The dialect of a table in text: the separator of its fields, and the blanks that are not part of them."""

import re
from dataclasses import dataclass

_SIGNS = (",", ";", "\t")
_NAMED = re.compile(r'"?sep=([^"\r\n])\1*"?[ \t]*')
"""A first line by which Excel names the separator."""
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)?")
_QUOTED = re.compile(r'"(?:[^"]++|"")*+"')


@dataclass(frozen=True)
class Table:
    """A table, ready for `csv`.

    Attributes:
        text: the header and the rows.
        separator: the sign between fields.
        line: number of the first line of `text` in the file, from 1.
    """

    text: str
    separator: str
    line: int = 1


def table_of(text: str, usual: str) -> Table:
    """Returns the table that a text has; `usual` is the separator of files with its suffix.

    The separator is the one that Excel's line `sep=;` names, or else the usual one, a comma, a semicolon or a tab:
    the first of these that the header has. Where blanks stand beside a separator of the header, as in `text, label`,
    they belong to the separators in all rows, except within quotes.
    """
    line = 1
    first = _line(text)
    if (named := _NAMED.fullmatch(first.rstrip("\r\n"))) is not None:
        text, line = text[len(first) :], 2
    header = _QUOTED.sub("", _line(text.lstrip("\r\n")))
    signs = (usual, *_SIGNS) if named is None else (named[1],)
    separator = next((sign for sign in signs if sign in header), signs[0])
    blank = "[ ]" if separator == "\t" else r"[ \t]"
    if re.search(f"{blank}{re.escape(separator)}|{re.escape(separator)}{blank}", header):
        text = _without_blanks(text, re.escape(separator), blank)
    return Table(text, separator, line)


def _line(text: str) -> str:
    found = _LINE.match(text)
    return "" if found is None else found[0]


def _without_blanks(text: str, sign: str, blank: str) -> str:
    """Returns the text without blanks around fields; `sign` and `blank` are patterns."""
    end = rf"(?={sign}|[\r\n]|\Z)"
    quoted, plain = rf"{blank}*+({_QUOTED.pattern}){blank}*+{end}", rf'{blank}++(?!")'
    return re.sub(rf"(^|[\r\n]|{sign})(?:{quoted}|{plain}|)|{blank}++{end}", r"\1\2", text)

"""Escapes and shortens untrusted strings before they are recorded or shown."""

import json
import unicodedata

MESSAGE_CHARACTERS = 300
"""Maximum length to which `shorten` cuts a message from outside."""

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of characters that control a terminal or are invisible: control characters,
format characters (text direction, zero width, byte order mark, tags), surrogates, line ends."""


def printable(text: str) -> str:
    r"""Return a string as one line, with control and invisible characters escaped.

    Escapes are written as in Python: `\x1b`, `\n`, `\u202e`. All other characters, even
    backslashes, are unchanged, so that a message may be escaped where it is built and again where
    it is shown.
    """
    if text.isprintable():  # the common case
        return text
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if unicodedata.category(character) in _UNSAFE
        else character
        for character in text
    )


def printable_lines(text: str) -> str:
    """Return a text with each of its lines made `printable`."""
    return "\n".join(printable(line) for line in text.split("\n"))


def shorten(text: str, characters: int = MESSAGE_CHARACTERS) -> str:
    """Cut a string to a number of characters; a cut string ends with its original length."""
    if len(text) <= characters:
        return text
    end = f"... ({len(text):,} characters)"
    return text[: characters - len(end)] + end


def redacted(text: str, secret: str | None) -> str:
    """Return a text in which *** replaces a secret, also where JSON or `repr` has escaped it.

    Redact before cutting: a cut could leave a part of the secret.
    """
    quoted = json.dumps(secret or "")[1:-1]
    forms = {secret or "", quoted, quoted.replace("/", "\\/"), repr(secret or "")[1:-1]} - {""}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text


def error_text(error: BaseException) -> str:
    """Return type and message of an exception as one short line, even if its `__str__` raises."""
    name = type(error).__name__
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as second:
        return printable(shorten(f"{name}, whose __str__ raised {type(second).__name__}"))
    return printable(shorten(f"{name}: {text}"))

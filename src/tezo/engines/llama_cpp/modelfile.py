"""A Modelfile for Ollama, with the template of the file in Go's language.

The file's template is rendered on conversations with marks in the place of texts. Where it turns out to write each
message by its role alone, the same is written in Go. Where it does not, Ollama is left to choose a template.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tezo.engines.llama_cpp.tokenizer import LlamaTokenizer

_USER, _ANSWER, _NEXT, _SYSTEM = "mark-of-one", "mark-of-two", "mark-of-three", "mark-of-four"
Conversation = Sequence[tuple[str, str]]
"""Roles and texts."""


@dataclass(frozen=True)
class Wording:
    """How a template writes a conversation.

    Attributes:
        unsaid: what stands first where there is no system message.
        around: role -> (text before a message, text behind it).
        opening: what opens the next answer.
    """

    unsaid: str
    around: dict[str, tuple[str, str]]
    opening: str

    def written(self, messages: Conversation) -> str:
        """Returns a conversation and what opens the next answer."""
        parts = [f"{self.around[role][0]}{text}{self.around[role][1]}" for role, text in messages]
        return ("" if messages[0][0] == "system" else self.unsaid) + "".join(parts) + self.opening

    def in_go(self) -> str:
        """Returns the template in Go's language."""
        first = f"{{{{ if not .System }}}}{self.unsaid}{{{{ end }}}}" if self.unsaid else ""
        branches = "{{ else ".join(
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{behind}'
            for role, (before, behind) in self.around.items()
        )
        return f"{first}{{{{ range .Messages }}}}{{{{ {branches}{{{{ end }}}}{{{{ end }}}}{self.opening}"


def modelfile(name: str, tokenizer: LlamaTokenizer) -> str:
    """Returns the text of a Modelfile.

    Args:
        name: of the GGUF file beside it.
        tokenizer: of the file.
    """
    lines, wording = [f"FROM ./{name}"], wording_of(tokenizer)
    if wording is not None:
        lines.append(f'TEMPLATE """{wording.in_go()}"""')
    elif tokenizer.chat_template is not None:
        lines.append("# TEMPLATE is left to Ollama: the file's template does not write each message by its role alone.")
    return "\n".join([*lines, *(f'PARAMETER stop "{stop}"' for stop in stops(tokenizer))]) + "\n"


def stops(tokenizer: LlamaTokenizer) -> list[str]:
    """Returns the texts of tokens that end an answer: the file's end of a text, and those that its template writes."""
    template = tokenizer.chat_template or ""
    texts = {token: tokenizer.decode([token]) for token in tokenizer.ends}
    found = [text for token, text in texts.items() if text in template or token == tokenizer.eos_token_id]
    return [text for text in found if text.strip() and not {'"', "\n", "\\"} & set(text)]


def wording_of(tokenizer: LlamaTokenizer) -> Wording | None:
    """Returns how the file's template writes; None: there is none, or messages depend on more than their roles."""
    talk = [("user", _USER), ("assistant", _ANSWER), ("user", _NEXT)]
    whole, two, one, opened = (
        _rendered(tokenizer, part, opens=opens)
        for part, opens in ((talk, False), (talk[:2], False), (talk[:1], False), (talk[:1], True))
    )
    if None in (whole, two, one, opened):
        return None
    assert whole is not None and two is not None and one is not None and opened is not None
    parts = _between(whole, [_USER, _ANSWER, _NEXT])
    if parts is None or not opened.startswith(one) or _ANSWER not in two:
        return None
    first, asked, answered, user_end = parts
    answer_end = two.rpartition(_ANSWER)[2]
    user = answered.removeprefix(answer_end)
    around = {"user": (user, user_end), "assistant": (asked.removeprefix(user_end), answer_end)}
    unsaid = first.removesuffix(user)
    told = _rendered(tokenizer, [("system", _SYSTEM), *talk[:1]], opens=False)
    system = None if told is None else _between(told, [_SYSTEM, _USER])
    if system is not None:
        around = {"system": (system[0], system[1].removesuffix(user))} | around
    found = Wording(unsaid, around, opened.removeprefix(one))
    texts = [text for pair in around.values() for text in (*pair, unsaid, found.opening)]
    if any(mark in text for text in texts for mark in ('"""', "{{", "}}")):
        return None
    known = [talk[:1], talk] + [[("system", "Be brief."), *part] for part in (talk[:1], talk) if system is not None]
    return found if all(_rendered(tokenizer, part, opens=True) == found.written(part) for part in known) else None


def _rendered(tokenizer: LlamaTokenizer, messages: Conversation, *, opens: bool) -> str | None:
    """Returns a conversation by the file's template, without the token that llama.cpp puts before a text."""
    try:
        named = [{"role": role, "content": text} for role, text in messages]
        text = str(tokenizer.apply_chat_template(named, add_generation_prompt=opens))
    except Exception:  # there is no template, or it refuses a role
        return None
    first = tokenizer("a")["input_ids"][:1]
    return text.removeprefix(tokenizer.bos_token) if first == [tokenizer.bos_token_id] else text


def _between(text: str, marks: Sequence[str]) -> list[str] | None:
    """Returns the texts before, between and behind marks; None where they are not there once each, in order."""
    found = []
    for mark in marks:
        before, seen, text = text.partition(mark)
        if not seen:
            return None
        found.append(before)
    return [*found, text]

"""Tokens and texts that end an answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tezo.system.errors import RequestError

_QUESTION, _ANSWER = "mark-of-a-question", "mark-of-an-answer"


@dataclass(frozen=True)
class Ends:
    """The ends of answers that a model knows.

    Attributes:
        text: id of the token that ends a text; None if neither the tokenizer nor the model's configuration names one.
        turn: the chat template's text after the assistant's message, up to the token that ends the turn; "" if it
            writes no token.
        turn_token: id of that token; None if there is none.
        marks: all ids that end an answer -> the token.
        unnamed: those of them that the model's generation_config does not name, as programs that read it go by.
    """

    text: int | None
    turn: str
    turn_token: int | None
    marks: dict[int, str]
    unnamed: frozenset[int] = frozenset()

    def within(self, answer: str, before: str, *, chat: bool) -> tuple[str, int | None]:
        """Returns (an answer with the template's text after it, once; the token that must then end it, or None).

        Args:
            answer: the text, which may have its end already.
            before: the text in front of it.
            chat: whether a chat template wrote that; it also counts as such if it has the token that ends turns.
        """
        rendered = self.turn_token is not None and (chat or self.marks[self.turn_token] in before)
        bare = answer.rstrip()
        if bare.endswith(tuple(self.marks.values())):  # text after the token in a template is not learnt
            return bare, self.turn_token if rendered else self.text
        opened = self.turn.removesuffix(self.marks[self.turn_token]) if self.turn_token in self.marks else ""
        if rendered and opened.strip() and bare.endswith(opened):  # the first of two tokens
            return bare.removesuffix(opened) + self.turn, self.turn_token
        return (answer + self.turn, self.turn_token) if rendered else (answer, self.text)


def ends_of(tokenizer: Any, model: Any) -> Ends:
    """Returns the ends by a tokenizer with its chat template and by a model's generation_config."""
    config = getattr(model, "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    configured = [token for token in (named if isinstance(named, list | tuple) else [named]) if token is not None]
    if not all(isinstance(token, int) for token in configured):
        raise RequestError(
            f"model.name: eos_token_id of its generation_config is {str(named)[:80]!r}; it must be a number, or a list "
            "of numbers."
        )
    known = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    if getattr(config, "_from_model_config", False):  # a default of an architecture may be a word
        configured = [token for token in configured if token in known]
    usual = [int(tokenizer.eos_token_id)] if tokenizer.eos_token_id is not None else []
    text = next((token for token in (*usual, *configured) if token in known), None)
    turn, turn_token = _turn(tokenizer, {*usual, *configured})
    ids = [*usual, *configured, *([turn_token] if turn_token is not None else [])]
    tokens = {token: tokenizer.convert_ids_to_tokens(token) for token in ids}
    unnamed = frozenset(ids).difference(configured) if config is not None else frozenset[int]()
    return Ends(text, turn, turn_token, {token: name for token, name in tokens.items() if name}, unnamed)


def _turn(tokenizer: Any, ends: set[int]) -> tuple[str, int | None]:
    """Returns (the chat template's text after the assistant's message, up to the end of the turn; its token).

    The token is one of `ends`, if nothing but tokens comes before it, or else the first. Where there is none, it is one
    of `ends` with which the next turn opens.
    """
    if tokenizer.chat_template is None:
        return "", None
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    behind = _written_behind(tokenizer, added)
    if not behind:
        (text, token), *_ = [*_written_behind(tokenizer, added, next_turn=True), ("", None)]
        return (text, token) if token in ends else ("", None)
    turn = ""
    for place, (text, token) in enumerate(behind):
        if place and text not in added:  # there is text before the token
            break
        turn += text
        if token in ends:
            return turn, token
    return behind[0]


def _written_behind(tokenizer: Any, added: Mapping[str, int], *, next_turn: bool = False) -> list[tuple[str, int]]:
    """Returns each token that the template writes behind the assistant's message, with the text before it."""
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        whole = str(tokenizer.apply_chat_template([*messages, *messages[:next_turn]], tokenize=False))
    except Exception:  # a template that needs more than these messages
        return []
    _, found, rest = whole.rpartition(_ANSWER)
    behind: list[tuple[str, int]] = []
    while found and (places := [(rest.index(token), -len(token), token) for token in added if token in rest]):
        place, _, token = min(places)
        behind.append((rest[: place + len(token)], int(added[token])))
        rest = rest[place + len(token) :]
    return behind


def text_after(tokenizer: Any, before: Sequence[int], ids: Sequence[int], *, special: bool) -> str:
    """Returns the text of tokens behind others, with the space that some tokenizers take from a first word."""

    def text(tokens: Sequence[int]) -> str:
        # spaces before punctuation, which some tokenizers clean up, are part of an answer
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(tokens), **options))

    start, whole = text(before), text([*before, *ids])
    return whole[len(start) :] if whole.startswith(start) else text(ids)

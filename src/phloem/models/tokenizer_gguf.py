"""GGUF vocabularies: owns the mapping from tokenizer.ggml.* to a backend of the `tokenizers` library.

Must not know templates, models or files: a metadata mapping in, a backend out. A pre-tokeniser that is not known
here is an error, since a wrong one costs quality without a sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from phloem.errors import CheckpointError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_WORDS_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES  # digits by three
)
_WORDS_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_WORDS_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(ending: str, digits: str) -> str:
    """Words that split where case changes, as tekken and gpt-4o have them."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{first}{_UPPER}*{_LOWER}+{ending}|{first}{_UPPER}+{_LOWER}*{ending}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
    )


class _Pre(NamedTuple):
    """A pre-tokeniser: patterns applied one after the other, whole words taken before merging, BOS by default."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = _Pre((_WORDS_GPT2,))
_DIGITS_GPT2 = _Pre((r"\p{N}", _WORDS_GPT2))
_LLAMA3 = _Pre((_WORDS_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = _Pre((_WORDS_QWEN2,))
_GPT4O = _Pre((_cased_words(_CONTRACTIONS + "?", r"\p{N}{1,3}"),))

PRE_TOKENIZERS: dict[str, _Pre] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "trillion", "gigachat", "mellum"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b"), _DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe", "glm4"), _Pre((_WORDS_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "kormo", "hunyuan"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _Pre((_cased_words("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "seed-coder": _Pre((_WORDS_SEED,)),
    "deepseek-coder": _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": _Pre(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
        )
    ),
}
"""Known values of tokenizer.ggml.pre. Sources: the tokenizer.json files of the models that they are named after."""


class GgufVocabulary(NamedTuple):
    """A backend, the ids that `encode` may put before and after a text, and the tokens' texts by id."""

    backend: Tokenizer
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    tokens: list[str]


def build_vocabulary(metadata: Mapping[str, Any], source: str) -> GgufVocabulary:
    """Build the tokeniser that GGUF metadata describe.

    Raises CheckpointError naming the key if the vocabulary is missing, contradictory or of an unknown kind.
    """
    tokens = _list(metadata, "tokenizer.ggml.tokens", source)
    kinds = _numbers(metadata, "tokenizer.ggml.token_type", source, [_NORMAL] * len(tokens))
    ids = {token: i for i, token in enumerate(tokens)}
    model = metadata.get("tokenizer.ggml.model")
    model = model if isinstance(model, str) else None
    if model == "gpt2":
        backend, add_bos = _byte_level(metadata, ids, source)
    elif model == "llama":
        backend, add_bos = _sentence_piece(metadata, tokens, ids, source)
    else:
        raise CheckpointError(f"{source}: tokenizer.ggml.model is {model!r}; served are 'gpt2' and 'llama'")
    if backend.get_vocab_size() != len(ids):
        raise CheckpointError(f"{source}: tokenizer.ggml.tokens does not hold what its model needs")
    _add_special(backend, tokens, kinds)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", add_bos) is True
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False) is True
    bos, eos = (special_id(metadata, name, len(tokens), source) for name in ("bos", "eos"))
    return GgufVocabulary(
        backend,
        (bos,) if add_bos and bos is not None else (),
        (eos,) if add_eos and eos is not None else (),
        tokens,
    )


def _list(metadata: Mapping[str, Any], key: str, source: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{source}: {key} is missing or no list of strings: the file has no tokenizer")
    return values


def _numbers(metadata: Mapping[str, Any], key: str, source: str, default: list[int] | None) -> list[Any]:
    """One number per token, `default` if the key is absent."""
    values = metadata.get(key, default)
    values = values.tolist() if isinstance(values, np.ndarray) else values
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    if not isinstance(values, list) or len(values) != num_tokens or not all(_is_number(value) for value in values):
        raise CheckpointError(f"{source}: {key} must hold {num_tokens} numbers, one per token")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def special_id(metadata: Mapping[str, Any], name: str, num_tokens: int, source: str) -> int | None:
    """The id that GGUF gives the special token `name` (bos, eos, eot, ...); None if it gives none."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < num_tokens):
        raise CheckpointError(f"{source}: {key} must be a token id below {num_tokens}, got {value!r}")
    return value


def _byte_level(metadata: Mapping[str, Any], ids: dict[str, int], source: str) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        got = "missing (a file from before May 2024: convert the model again)" if name is None else repr(name)
        raise CheckpointError(f"{source}: tokenizer.ggml.pre is {got}; known are {known}")
    pre = PRE_TOKENIZERS[name]
    merges: list[tuple[str, str]] = []
    for merge in _list(metadata, "tokenizer.ggml.merges", source):
        left, space, right = merge.partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise CheckpointError(f"{source}: tokenizer.ggml.merges holds {merge!r}, whose parts are no tokens")
        merges.append((left, right))
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges))
    if pre is _GPT2:  # the library's own pattern, compiled into it
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: list[str], ids: dict[str, int], source: str
) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE: pieces join in the order of their scores; unknown characters become bytes."""
    scores = _numbers(metadata, "tokenizer.ggml.scores", source, None)
    unknown = special_id(metadata, "unknown", len(tokens), source) or 0
    merges = _merges_by_score(tokens, ids, scores)
    backend = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True) is not False:
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(ends)
    return backend, True


def _merges_by_score(tokens: list[str], ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece: best score of the whole first, then by the ids of the halves."""
    ranked = sorted(range(len(tokens)), key=lambda i: (-float(scores[i]), i))
    merges: list[tuple[str, str]] = []
    for i in ranked:
        whole = tokens[i]
        pairs = []
        for cut in range(1, len(whole)):
            left, right = ids.get(whole[:cut]), ids.get(whole[cut:])
            if left is not None and right is not None:
                pairs.append((left, right))
        merges += [(tokens[left], tokens[right]) for left, right in sorted(pairs)]
    return merges


def _add_special(backend: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Tokens that are found in the text before it is split into words."""
    control, plain = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        if token and kind == _CONTROL:
            control.append(AddedToken(token, special=True, normalized=False))
        elif token and kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(control)
    backend.add_tokens(plain)

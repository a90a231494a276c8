"""`outrider completion bash|zsh`: completion of verbs, groups, keys, choices and values.

    source <(outrider completion bash)   # in ~/.bashrc
    source <(outrider completion zsh)    # in ~/.zshrc, after compinit

The script of the shell calls `outrider completion line=TEXT` with the line up to the cursor and
offers the words that this prints. Keys and values come from the composed configuration and the
schema; torch is not imported. Differs from Hydra's completion, which completes one application's
configuration: verbs, their own groups, the keys that a verb uses, and the values of a key.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

from outrider.conf.command_settings import VERB_GROUPS
from outrider.conf.compose import (
    choices,
    compose,
    default_choices,
    drafter_keys,
    flatten,
    to_container,
    trainable,
)
from outrider.conf.errors import ConfigError
from outrider.conf.fields import leaf_fields
from outrider.conf.schema import GROUPS
from outrider.launch.verbs import BENCHES, VERBS, Verb

BASH = r"""_outrider() {
    local line=${COMP_LINE:0:COMP_POINT} word found IFS=$'\n'
    word=${line##* }
    found=($(outrider completion line="$line" 2>/dev/null))
    COMPREPLY=("${found[@]#"${word%"${word##*[=:]}"}"}")  # bash replaces what follows = or :
    [[ ${COMPREPLY[0]} == *[=.] ]] || compopt +o nospace
}
complete -o default -o nospace -F _outrider outrider"""
ZSH = r"""_outrider() {
    local -a found
    found=(${(f)"$(outrider completion line="${LBUFFER}" 2>/dev/null)"})
    if (( ! ${#found} )); then
        compset -P '*='
        _files
    else
        compadd -Q -S '' -- ${(M)found:#*[=.]}
        compadd -Q -- ${found:#*[=.]}
    fi
}
compdef _outrider outrider"""
SCRIPTS = {"bash": BASH, "zsh": ZSH}


def completion(words: list[str]) -> int:
    """Print the script of a shell; for `line=TEXT`, the candidates of its last word."""
    word = " ".join(words)
    if word.startswith("line="):
        print("\n".join(candidates(word.removeprefix("line="))))
    elif word in SCRIPTS:
        print(SCRIPTS[word])
    else:
        why, fix = "Completion needs the name of a shell.", f"Use one of: {', '.join(SCRIPTS)}."
        raise ConfigError("completion", word, why, fix)
    return 0


def candidates(line: str) -> list[str]:
    """Return the words that may replace the last word of a line, sorted.

    candidates("outrider train drafter=ea") == ["drafter=eagle", "drafter=eagle3"]
    """
    *before, current = line.split(" ")
    words = [word for word in before[1:] if word]
    if not words:
        found: Iterable[str] = VERBS
    elif words[0] == "bench":
        found = BENCHES if len(words) == 1 else ()
    elif words[0] in VERBS:
        found = _of_verb(words[0], words[1:], current)
    else:
        found = ()
    return sorted({word for word in found if word.startswith(current)})


def _of_verb(name: str, words: list[str], current: str) -> Iterator[str]:
    """Yield the candidates for a verb's word: values after "=", else keys up to their next dot."""
    verb, (key, equals, value) = VERBS[name], current.partition("=")
    own = "sweep" if {"-m", "--multirun"} & {*words} else verb.group
    keys = _groups(name, own)
    if not equals or key not in keys:
        keys |= _keys(verb, own, words)
    if equals:
        first = value[: value.rfind(",") + 1]  # of a sweep's list
        yield from (f"{key}={first}{one}" for one in keys.get(key, ()))
        return
    for known in keys:
        end = known.find(".", len(current))
        yield f"{known}=" if end < 0 else known[: end + 1]


def _groups(name: str, own: str) -> dict[str, list[str]]:
    """Return the groups that a verb lets choose, with their choices."""
    verb = VERBS[name]
    found = {group: trainable(group) for group in (default_choices(verb.root) if verb.root else ())}
    if name in ("eval", "chat"):
        found["drafter"] = [one for one in choices("drafter") if "loss" not in drafter_keys(one)]
    if own == "sweep":
        found["sweep"] = choices("sweep")
    return {k: names for k, names in found.items() if len(names) > 1 and verb.uses_key(k)}


def _keys(verb: Verb, own: str, words: list[str]) -> dict[str, list[str]]:
    """Return every key of a verb with its known values; of the groups that `words` choose."""
    keys = dict[str, list[str]]()
    if verb.root:
        composed = to_container(_compose(words, verb.root), resolve=False)
        keys = {key: [] for key, _ in flatten(composed)}
        for group in composed.keys() & GROUPS.keys():
            values = _schema_keys(GROUPS[group], group)
            keys |= {key: values[key] for key in keys.keys() & values.keys()}
        keys = {key: values for key, values in keys.items() if verb.uses_key(key)}
    if own:
        keys |= _schema_keys(VERB_GROUPS[own], own)
    return keys


def _compose(words: list[str], root: str) -> Any:
    """Return the configuration of the words; the default one if they are not complete."""
    try:
        return compose([word for word in words if not word.startswith("-")], root)
    except ConfigError:
        return compose([], root)


def _schema_keys(schema: Any, prefix: str) -> dict[str, list[str]]:
    """Return the keys of a configuration dataclass with their values: of a Literal or a boolean."""
    return {key: list(_known_values(kind)) for key, kind, _ in leaf_fields(schema, prefix)}


def _known_values(kind: Any) -> Iterator[str]:
    if kind is bool:
        yield from ("true", "false")
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    else:  # a union with None, or a list
        for part in get_args(kind):
            yield from _known_values(part)

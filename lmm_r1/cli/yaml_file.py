"""YAML settings read by the type of their flag, with file and line in error messages."""

import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from lmm_r1.config.declared import JsonText
from lmm_r1.config.differences import only_defaults
from lmm_r1.dotted import nearest
from lmm_r1.files.user_code import UserFunction, function_file

SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NULL = ("", "~", "null", "none")


class YamlError(ValueError):
    """A settings file cannot be used; the message is one sentence naming the file and the line."""


def read_settings(path: Path, flags: Mapping[str, object]) -> dict[str, object]:
    """Return the settings in a YAML file under their dotted names; keys may be nested, dotted or both.

    Values are read from their text as the flag's type asks, so `1e-6` is a number and `off` a choice, which YAML's
    own rules would turn into a string and a boolean.

    Args:
        flags: the type of every known flag under its dotted name.

    Raises:
        YamlError: the file is missing or no YAML, a key is unknown or given twice, or a value has the wrong type.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise YamlError(f"--config {path}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise YamlError(f"--config {path}: not a UTF-8 text file") from None
    return parse_settings(text, flags, source=str(path))


def parse_settings(text: str, flags: Mapping[str, object], *, source: str | None) -> dict[str, object]:
    """Return the settings in a YAML text, as `read_settings` does.

    Args:
        source: what the text is, in front of the line in messages; None is a text that nobody has written, without lines.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlError(f"{_place(source, line)}not valid YAML: {error.problem}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise YamlError(f"{_at(root, source)}expected settings such as `train.seed: 1`")
    settings: dict[str, object] = {}
    accepted = only_defaults(flags)
    kinds = {**flags, **{name: known.kind for name, known in accepted.items()}}
    for name, node in _leaves(root, kinds, prefix="", source=source):
        where = _at(node, source)
        if name in settings:
            raise YamlError(f"{where}{name} is given twice")
        try:
            settings[name] = _convert(node, kinds[name])
        except ValueError as error:
            raise YamlError(f"{where}{name} {error}") from None
        if name in accepted and settings[name] != accepted[name].value:
            raise YamlError(f"{where}{accepted[name].refusal(f'{name} {settings[name]}')}")
    return {name: value for name, value in settings.items() if name not in accepted}


def _at(node: yaml.Node, source: str | None) -> str:
    return _place(source, node.start_mark.line + 1)


def _place(source: str | None, line: int) -> str:
    return "" if source is None else f"{source}:{line}: "


def _leaves(
    mapping: yaml.MappingNode, flags: Mapping[str, object], *, prefix: str, source: str | None
) -> Iterator[tuple[str, yaml.Node]]:
    for key, value in mapping.value:
        where = _at(key, source)
        if not isinstance(key, yaml.ScalarNode):
            raise YamlError(f"{where}a key must be a name")
        name = prefix + key.value.replace("-", "_")
        if name in flags:
            yield name, value
        elif any(flag.startswith(f"{name}.") for flag in flags):
            if not isinstance(value, yaml.MappingNode):
                raise YamlError(f"{where}{name} is a group of settings, not a setting")
            yield from _leaves(value, flags, prefix=f"{name}.", source=source)
        else:
            advice = _advice(name, flags)
            if advice or not value.value or not isinstance(value, yaml.MappingNode):
                raise YamlError(f"{where}{advice or f'unknown key {name}'}")
            # The names inside say what is meant.
            yield from _leaves(value, flags, prefix=f"{name}.", source=source)


def _advice(name: str, flags: Mapping[str, object]) -> str:
    # Imported only if needed: a large table.
    from lmm_r1.tools.migrate.other_names import counterpart

    if here := counterpart(name, known=flags):
        return f"{name} {here.replace('--', '')}"
    match = nearest(name, known=flags)
    return f"unknown key {name}; did you mean {match}?" if match else ""


def read_texts(texts: Sequence[str], hint: object) -> object:
    """Return the value of a flag from its words on a command line; a ValueError says what was expected."""
    tag = "tag:yaml.org,2002:str"
    # Only None is open: other words stay as they are.
    nodes: list[yaml.Node] = [yaml.ScalarNode(tag, text, style='"') for text in texts]
    if texts == ["None"]:
        nodes = [yaml.ScalarNode(tag, "null")]
    elif tuple in (typing.get_origin(member) for member in (hint, *typing.get_args(hint))):
        nodes = [yaml.SequenceNode(tag, nodes)]
    if not nodes:
        raise ValueError(f"needs a value: {_describe(hint)}")
    return _convert(nodes[0], hint)


def _convert(node: yaml.Node, hint: object) -> object:
    """Return the node's value as `hint` asks; a ValueError says what was expected."""
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _convert(node, parameters[0])
    if origin in (typing.Union, types.UnionType):
        members = [member for member in parameters if member is not type(None)]
        if UserFunction in members:
            members = _choices_or_file(members, node.value)
        choices = [choice for member in members for choice in typing.get_args(member)]
        if type(None) in parameters and _is_null(node) and node.value not in choices:
            return None
        return _first_that_fits(node, members)
    if origin is tuple:
        return _convert_tuple(node, parameters)
    if hint is JsonText and isinstance(node, yaml.MappingNode):
        return json.dumps(_as_json(node), ensure_ascii=False)
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"must be {_describe(hint)}, not a list or a group")
    return _convert_text(node.value, hint)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value.lower() in NULL


def _first_that_fits(node: yaml.Node, members: list[object]) -> object:
    for member in members[:-1]:
        try:
            return _convert(node, member)
        except ValueError:
            continue
    return _convert(node, members[-1])


def _convert_tuple(node: yaml.Node, parameters: tuple[object, ...]) -> tuple[object, ...]:
    if not isinstance(node, yaml.SequenceNode):
        raise ValueError("must be a list such as [0.9, 0.95]")
    if parameters[-1] is Ellipsis:
        return tuple(_convert(item, parameters[0]) for item in node.value)
    if len(node.value) != len(parameters):
        raise ValueError(f"must have {len(parameters)} values, not {len(node.value)}")
    return tuple(_convert(item, hint) for item, hint in zip(node.value, parameters, strict=True))


def _as_json(node: yaml.Node) -> object:
    """Return a node as JSON has it: what is not quoted and reads as a number, true, false or null in JSON is one."""
    if isinstance(node, yaml.MappingNode):
        found = {_as_key(key): _as_json(value) for key, value in node.value}
        if len(found) < len(node.value):
            raise ValueError("names a key twice")
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_as_json(item) for item in node.value]
    assert isinstance(node, yaml.ScalarNode), "there is no other kind"
    if node.style is not None:
        return node.value
    try:
        return json.loads(node.value)
    except json.JSONDecodeError:
        return node.value


def _as_key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("must have names as keys")
    return str(node.value)


def _convert_text(text: str, hint: object) -> object:
    if typing.get_origin(hint) is typing.Literal:
        for choice in typing.get_args(hint):
            if str(choice) == text:
                return choice
    elif hint is bool:
        if text.lower() in SWITCH:
            return SWITCH[text.lower()]
    elif hint is float and text.lower().lstrip("+-") == ".inf":
        return float(text.replace(".", ""))
    else:
        try:
            return typing.cast(type, hint)(text)
        except (TypeError, ValueError):
            pass
    raise ValueError(f"must be {_describe(hint)}, not {text!r}{_meant(text, hint)}")


def _choices_or_file(members: list[object], text: object) -> list[object]:
    """Return what a value may be that is either a choice or a function of a file: only one of them, by its form."""
    is_file = isinstance(text, str) and function_file(text) is not None
    return [member for member in members if (member is UserFunction) == is_file]


def _meant(text: str, hint: object) -> str:
    """Return the end of a sentence that suggests a choice for an unknown value; "" without a suggestion."""
    if typing.get_origin(hint) is not typing.Literal:
        return ""
    from lmm_r1.tools.migrate.table import names_of

    choices = [str(choice) for choice in typing.get_args(hint)]
    here = names_of("estimators").get(text.lower().replace("++", "_plus_plus").replace("-", "_").replace("@", ""))
    if here in choices:
        return f", which is called {here} here"
    match = nearest(text, known=choices)
    return f"; did you mean {match}?" if match else ""


def _describe(hint: object) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    names: dict[object, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        JsonText: "JSON",
    }
    return names.get(hint, str(hint))

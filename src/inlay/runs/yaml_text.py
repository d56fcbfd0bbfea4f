"""YAML as we read it: settings of a few lines, nothing that takes for ever, no key twice."""

from __future__ import annotations

from typing import Any

import yaml

from inlay.errors import ConfigError

LARGEST = 1 << 20
DEEPEST = 30
DIGITS = 20


def read_yaml(text: str, source: str) -> Any:
    """What a YAML text holds; `source` is what messages call it."""
    if len(text) > LARGEST:
        raise ConfigError(f"{source} is larger than settings can be ({len(text):,} characters).")
    try:
        return yaml.load(text, Loader=_Careful)  # noqa: S506 (a SafeLoader that takes less)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{source} is not YAML that holds settings: {error}") from None


class _Careful(yaml.SafeLoader):
    """Refuses aliases, which can stand for more than any memory holds, keys that come twice, and numbers of no use."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not read", problem_mark=event.start_mark)
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"it is nested deeper than {DEEPEST} levels")
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, Any] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
                seen[key.value] = key
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > DIGITS:
            raise yaml.MarkedYAMLError(problem="a number has too many digits", problem_mark=node.start_mark)
        return super().construct_yaml_int(node)


_Careful.add_constructor("tag:yaml.org,2002:int", _Careful.construct_yaml_int)

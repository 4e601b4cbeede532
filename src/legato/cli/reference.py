"""Prints the reference of `legato serve`: every flag, endpoint and field, as the code has them."""

from typing import Any, cast

from legato.server.app import create_app
from legato.server.openapi import Schema
from legato.server.service import Service

_HEAD = """# Reference of `legato serve`

Made from the code by `make reference`; [serving.md](serving.md) says how to use it.
"""


def reference() -> str:
    """The whole of it, in Markdown."""
    nothing = cast(Any, None)  # the routes are asked for, and none of them is called
    told = create_app(Service(nothing, nothing, "model")).openapi()
    return "\n".join([_HEAD, *_flags(), *_endpoints(told["paths"]), *_objects(told)]) + "\n"


def _flags() -> list[str]:
    import typer

    from legato.cli import app

    command: Any = cast(Any, typer.main.get_command(app)).commands["serve"]
    ctx = command.make_context("serve", [], resilient_parsing=True)
    panels: dict[str, list[str]] = {}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is not None and param.param_type_name == "option":
            panels.setdefault(param.rich_help_panel or "Server", []).append(_row(f"`{record[0]}`", record[1]))
    lines = ["## Flags", "", "`legato serve MODEL [FLAGS]`", ""]
    for panel, rows in panels.items():
        lines += [f"### {panel}", "", "| flag | what |", "|---|---|", *rows, ""]
    return lines


def _endpoints(paths: dict[str, Schema]) -> list[str]:
    lines = ["## Endpoints", ""]
    for path, operations in paths.items():
        for method, operation in operations.items():
            lines += [f"### {method.upper()} {path}", "", operation["description"], ""]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body:
                lines += [f"Body: {_kind(body)}.", ""]
            lines += ["| status | content | when |", "|---|---|---|"]
            for status, response in operation["responses"].items():
                contents = (f"{_kind(c['schema'])} ({name})" for name, c in response.get("content", {}).items())
                lines.append(_row(status, " or ".join(contents), response["description"]))
            lines.append("")
    return lines


def _objects(told: Schema) -> list[str]:
    lines = ["## Objects", ""]
    for name, schema in sorted(told["components"]["schemas"].items()):
        lines += [f"### {name}", ""]
        if schema.get("description"):
            lines += [schema["description"], ""]
        required = schema.get("required", [])
        lines += ["| field | type | what |", "|---|---|---|"]
        for field, said in schema.get("properties", {}).items():
            default = said.get("default")
            notes = [said.get("description", "")]
            notes += ["Required."] if field in required and "description" in said else []
            notes += [f"Default: `{str(default).lower()}`."] if default not in (None, {}, []) else []
            lines.append(_row(f"`{field}`", _kind(said), " ".join(filter(None, notes))))
        lines.append("")
    return lines


def _kind(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    if "const" in schema or "enum" in schema:
        return " or ".join(f'"{value}"' for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if "properties" in schema:
        return "{" + ", ".join(f"{name}: {_kind(one)}" for name, one in schema["properties"].items()) + "}"
    kinds = schema.get("type", "anything")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(reference(), end="")

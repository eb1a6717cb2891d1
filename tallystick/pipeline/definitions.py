"""The definitions of the columns that a keyed state goes by, as part of its meaning.

    with_columns(paid="price * n").key_by("lower(user) AS who").process(top_n(3, "paid"))

    column["who"]   lower("user")
    column["paid"]  ("price" * "n")

The columns are those of the key, and those that the meaning of a state names. A definition goes
back through expressions, to the columns of the input or of the keyed step before. A column as a
function of the user's makes it has none: code cannot be compared. Filters are free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tallystick.expressions.binding import Projection
from tallystick.expressions.nodes import Node
from tallystick.pipeline.inputs import PipelineInput
from tallystick.state.meaning import FUNCTION, name_text
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.keyed_step import Stages
from tallystick.tasks.outputs import Filter
from tallystick.tasks.read import BatchFunction


def with_definitions(
    steps: Sequence[KeyedStep], stages: Stages, inputs: Sequence[PipelineInput]
) -> tuple[KeyedStep, ...]:
    """Return keyed steps with the definitions of columns in the meanings of their states.

    Args:
        steps: the keyed steps.
        stages: the steps of the pipeline by the place where they run.
        inputs: of the pipeline.
    """
    result = []
    for number, step in enumerate(steps):
        if number or stages.frames is not None:
            functions = steps[number - 1].functions if number else stages.after
            is_known = bool(number)  # of DataFrame code nobody knows what it does
            definitions = [*_definitions(step, functions, "", is_known=is_known)]
        else:
            definitions = [
                one
                for at, source in enumerate(inputs)
                for one in _of_input(step, source, at, stages, is_only=len(inputs) == 1)
            ]
        declared = tuple(
            replace(state, meaning=(*state.meaning, *definitions)) for state in step.declared
        )
        result.append(replace(step, declared=declared))
    return tuple(result)


def _of_input(
    step: KeyedStep, source: PipelineInput, at: int, stages: Stages, *, is_only: bool
) -> Iterator[tuple[str, str]]:
    """Yield the definitions of an input's columns."""
    steps = [step_before.function for step_before in source.steps]
    label = "" if is_only and not source.name else f"[{name_text(source.name or source.uid)}]"
    named = stages.keyed[0].step.inputs
    if not named:
        return _definitions(step, (*steps, *stages.before), label)
    key, _ = named[at]
    columns = [field.name for field in step.columns.field(source.name).type]
    return _definitions(step, steps, label, (key, columns))


def _definitions(
    step: KeyedStep,
    functions: Sequence[BatchFunction],
    label: str,
    of_named: tuple[Sequence[str], Sequence[str]] | None = None,
    *,
    is_known: bool = True,
) -> Iterator[tuple[str, str]]:
    """Yield arguments of a meaning: a column, and the text of its definition.

    Args:
        step: whose states they are.
        functions: what the rows pass through before the step.
        label: of the input, in the names of arguments.
        of_named: the key and the columns of a named input; None: rows come as one stream.
        is_known: the columns before the functions are those of an input or a keyed step.
    """
    pairs = [pair for state in step.declared for pair in state.meaning if pair[0] != FUNCTION]
    key, columns = of_named or (step.key.schema.names, step.columns.names)
    if of_named:
        pairs = [(argument, text) for argument, text in pairs if label in argument]
    meant = [name for name in columns if any(name_text(name) in text for _, text in pairs)]
    for name in dict.fromkeys([*key, *meant]):
        definition = _definition(name, functions, is_known=is_known)
        if definition is not None:
            yield f"column{label}[{name_text(name)}]", definition.canonical()


def _definition(name: str, functions: Sequence[BatchFunction], *, is_known: bool) -> Node | None:
    """Return the expression that a column is; None: a function of the user's makes it."""
    own = node = Node("column", value=(name,))
    for function in reversed(functions):
        if isinstance(function, Projection):
            node = node.over(function.definitions())
        elif not isinstance(function, Filter):
            is_known = False
            break
    return node if is_known or node.value != own.value else None

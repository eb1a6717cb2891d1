"""The definitions of the columns that a keyed state goes by, as part of its meaning.

    with_columns(paid="price * n").key_by("lower(user) AS who").process(top_n(3, "paid"))

    column["who"]   lower("user")
    column["paid"]  ("price" * "n")

The columns are those of the key, those that the meaning of a state names, and those of rows that
lie in the state as they came: of the sides of a join, and of a broadcast table. A definition goes
back through expressions, to the columns of the input or of the keyed step before. A column as a
function of the user's makes it has none: code cannot be compared. Filters are free.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tallystick.expressions.binding import Projection
from tallystick.expressions.nodes import Node
from tallystick.pipeline.inputs import PipelineInput
from tallystick.state.functions.joins import SIDES
from tallystick.state.functions.processing import ROWS, StateDeclaration
from tallystick.state.meaning import FUNCTION, name_text
from tallystick.state.schema import schema_from_text
from tallystick.tasks.keyed import KeyedStep
from tallystick.tasks.operator_state import TableStep
from tallystick.tasks.outputs import Filter
from tallystick.tasks.read import BatchFunction
from tallystick.tasks.steps import Stages


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
            definitions = _of_inputs(step, inputs, stages)
        declared = tuple(
            replace(state, meaning=(*state.meaning, *definitions)) for state in step.declared
        )
        result.append(replace(step, declared=declared))
    return tuple(result)


def table_with_definitions(table: TableStep) -> TableStep:
    """Return a broadcast table with the definitions of its columns as the meaning of its state."""
    # The last of its functions only checks the columns.
    names, functions = table.codec.columns.names, table.read.functions[:-1]
    return replace(table, meaning=tuple(_texts(names, functions, "", is_known=True)))


def _of_inputs(
    step: KeyedStep, inputs: Sequence[PipelineInput], stages: Stages
) -> list[tuple[str, str]]:
    """Return the definitions of all inputs' columns, each with the name of its input.

    Of inputs that come as one stream, what all have in common stands there without a name too: the
    state of a pipeline with one input has only that, and goes on when an input joins.
    """
    if named := stages.keyed[0].step.inputs:
        of_sides: list[tuple[str, str]] = []
        for source, (key, _) in zip(inputs, named, strict=True):
            columns = [field.name for field in step.columns.field(source.name).type]
            of_named = (key, columns)
            of_sides += _definitions(step, _functions_of(source), _label(source), of_named)
        return of_sides
    functions = [(*_functions_of(source), *stages.before) for source in inputs]
    first, *others = [[*_definitions(step, one, "")] for one in functions]
    pairs = [pair for pair in first if all(pair in other for other in others)]
    if others or inputs[0].name:
        for source, one in zip(inputs, functions, strict=True):
            pairs += _definitions(step, one, _label(source))
    return pairs


def _label(source: PipelineInput) -> str:
    return f"[{name_text(source.name or source.uid)}]"


def _functions_of(source: PipelineInput) -> list[BatchFunction]:
    return [step.function for step in source.steps]


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
    of_rows: list[str] = []
    if of_named:
        of_rows = [name for state in step.declared for name in _columns_of_rows(state, label)]
        pairs = [(argument, text) for argument, text in pairs if label in argument]
    meant = [name for name in columns if any(name_text(name) in text for _, text in pairs)]
    return _texts([*key, *meant, *of_rows], functions, label, is_known=is_known)


def _columns_of_rows(state: StateDeclaration, label: str) -> list[str]:
    """Return the columns of the rows of a join's side; none: the state is not of this input."""
    arguments = dict(state.meaning)
    side = next((side for side in SIDES if f"[{arguments.get(side)}]" == label), "")
    if not side:
        return []
    names = schema_from_text(state.value_schema).names
    if state.kind == ROWS:
        return list(names) if state.name == side else []
    return [name.removeprefix(f"{side}_") for name in names if name.startswith(f"{side}_")]


def _texts(
    names: Iterable[str], functions: Sequence[BatchFunction], label: str, *, is_known: bool
) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(names):
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

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import BaseModel, ValidationError

from mokbench.routing import RoutingSpec


@pytest.mark.parametrize(
    "short, full",
    [
        ("balanced", {"generator": "balanced"}),
        ("typical", {"generator": "lognormal", "value": 0.25, "preset": "typical"}),
        ("skewed", {"generator": "lognormal", "value": 0.6, "preset": "skewed"}),
        ("extreme", {"generator": "zipf", "value": 0.65, "preset": "extreme"}),
        ({"zipf": 0.8}, {"generator": "zipf", "value": 0.8}),
        ({"zipf": 1, "masked": 0.1}, {"generator": "zipf", "value": 1.0, "masked": 0.1}),
        ({"masked": 0.1}, {"generator": "balanced", "masked": 0.1}),
        ({"trace": "a.npz"}, {"generator": "trace", "trace": "a.npz", "layer": 0}),
        ({"trace": "a.npz", "layer": 3}, {"generator": "trace", "trace": "a.npz", "layer": 3}),
    ],
    ids=str,
)
def test_short_forms(short: object, full: dict[str, object]) -> None:
    spec = RoutingSpec.model_validate(short)
    assert spec == RoutingSpec.model_validate(full)
    assert hash(spec) == hash(RoutingSpec.model_validate(spec.model_dump(mode="json")))
    assert RoutingSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    "spec, message",
    [
        ("zip", "unknown routing 'zip', did you mean zipf.*allowed: balanced, typical"),
        ("zipf", r"zipf needs its value, as in \{zipf: 0.8\}"),
        ("trace", r"trace needs its file, as in \{trace: file.npz"),
        (3, "routing cannot be 3; allowed: balanced"),
        (None, "routing cannot be None"),
        ([], r"routing cannot be \[\]"),
        ({"zipf": 9}, "9 is out of range; s from 0.01 to 5"),
        ({"zipf": -1}, "-1 is out of range"),
        ({"zipf": None}, "zipf needs its value; s from"),
        ({"zipf": True}, "True is not a number"),
        ({"zipf": float("nan")}, "finite number"),
        ({"zipf": "many"}, "valid number"),
        ({"zipf": 1, "hot_rank": 2}, "one generator at a time, found zipf and hot_rank"),
        ({"zipf": 1, "preset": "typical"}, "zipf and preset cannot both be given"),
        ({"hot_rank": 0.5}, "0.5 is out of range; ratio from 1 "),
        ({"hot_expert": 1.5}, "share from .* to 1"),
        ({"preset": "heavy"}, "unknown preset 'heavy'; allowed: typical, skewed, extreme"),
        ({"preset": "typical", "value": 0.3}, "preset typical means value 0.25, found 0.3"),
        ({"generator": "balanced", "value": 2}, "balanced takes no value, found 2"),
        ({"generator": "lognormal"}, "lognormal needs its value; sigma from"),
        ({"generator": "trace"}, "the trace generator and a trace file go together"),
        ({"generator": "zipf", "value": 1, "trace": "a.npz"}, "go together"),
        ({"layer": 2}, "layer belongs to a trace"),
        ({"trace": "a.npz", "layer": -1}, "greater than or equal to 0"),
        ({"trace": "a.npz", "empty_experts": 2}, "routes are taken as recorded"),
        ({"hot_rank": 2, "empty_experts": 2}, "empty_experts does not go with hot_rank"),
        ({"masked": 1.1}, "less than or equal to 1"),
        ({"empty_ranks": -1}, "greater than or equal to 0"),
        ({"maskd": 0.1}, "Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_bad_specs_say_what_is_allowed(spec: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RoutingSpec.model_validate(spec)


@pytest.mark.parametrize(
    "spec, label",
    [
        ("balanced", "balanced"),
        ("extreme", "extreme"),
        ({"zipf": 0.65}, "zipf-0.65"),
        (
            {"hot_rank": 2.5, "masked": 0.1, "empty_ranks": 1},
            "hot_rank-2.5+masked-0.1+empty_ranks-1",
        ),
        ({"dirichlet": 1}, "dirichlet-1"),
        ({"trace": "some/dir/layer 36.npz", "layer": 2}, "trace-layer_36-l2"),
        ({"preset": "typical", "uneven": 0.123456789}, "typical+uneven-0.123456789"),
    ],
    ids=str,
)
def test_labels(spec: object, label: str) -> None:
    assert RoutingSpec.model_validate(spec).label == label


def test_json_schema_takes_the_short_forms() -> None:
    class Holder(BaseModel):
        routing: RoutingSpec

    schema = Holder.model_json_schema()
    for good in ["extreme", {"zipf": 0.8, "masked": 0.1}, {"trace": "a.npz", "layer": 1}]:
        jsonschema.validate({"routing": good}, schema)
    for bad in ["zipf", {"zipf": 9}, {"zipf": 1, "maskd": 1}, 3]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"routing": bad}, schema)

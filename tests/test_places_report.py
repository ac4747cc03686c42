"""Bytes between nodes and domains in reports, and only where there are several."""

import pytest
from fake_run import fake_machine, fake_meta, fake_record, measured, text_of

from mokbench import report
from mokbench.errors import ResultsError
from mokbench.gpus import Gpus
from mokbench.machine import Machine
from mokbench.results import RunFolder
from mokbench.run_checks import refuse_moved_ranks
from mokbench.run_meta import RunMeta
from mokbench.topology import RankPlace, Topology, one_machine

KIB = 1024
TWO_HOSTS = Topology.from_ranks([RankPlace(node=n, host=f"ns-{n}") for n in "aabb"])
RACK = Topology.from_ranks(
    [RankPlace(node=n, host=n, gpu=f"GPU-{i}", mnnvl="c-1") for i, n in enumerate("aabb")]
)


def traffic(same, cross_domain, cross_node, domains):
    wire = {
        "local_bytes": 5 * KIB,
        "same_domain_bytes": same,
        "cross_domain_bytes": cross_domain,
        "cross_node_bytes": cross_node,
    }
    half = (same + cross_domain) // 2
    phases = ("dispatch_useful", "dispatch_wire", "combine_useful", "combine_wire")
    return dict.fromkeys((f"{p}_bytes" for p in phases), half) | {
        "useful": wire,
        "wire": wire,
        "domains": domains,
    }


def stored(path, topology, moved, **changes):
    run = RunFolder.create(path, fake_meta(machine=fake_machine(), topologies=[topology]))
    fields = {"system": "alltoall", "traffic": moved, "nodes": topology.nodes, "link": "tcp"}
    record, samples = measured(fake_record(**fields, **changes), 100.0)
    run.append(record, samples)
    run.finish("done")
    return RunFolder.open(path)


def test_rows_of_two_hosts_show_what_goes_between_them(tmp_path):
    run = stored(tmp_path / "r", TWO_HOSTS, traffic(6 * KIB, 16 * KIB, 16 * KIB, 2))
    text = text_of([run], width=200)
    assert "r: 4 ranks on 2 nodes (ns-a, ns-b)\n" in text
    heading = next(line for line in text.splitlines() if "in domain" in line)
    row = next(line for line in text.splitlines() if line.startswith("alltoall "))
    for title, shown in (
        ("in domain", "6.00 KiB"),
        ("cross domain", "16.0 KiB"),
        ("cross node", "16.0 KiB"),
    ):
        end = heading.index(title) + len(title)
        assert row[:end].endswith(shown)
    assert "cross node: wire bytes between ranks on two nodes" in text
    for page in (report.markdown([run]), report.html_report([run])):
        assert "cross node" in page
        assert "16.0 KiB" in page
    (cell,) = report.json_report([run])["cells"]
    assert cell["traffic"]["wire"]["cross_node_bytes"] == 16 * KIB
    (told,) = report.json_report([run])["runs"]
    assert told["topologies"] == [TWO_HOSTS.model_dump(mode="json")]


def test_a_rack_has_bytes_between_nodes_and_none_between_domains(tmp_path):
    moved = traffic(22 * KIB, 0, 16 * KIB, 1)
    run = stored(tmp_path / "r", RACK, moved, fabric="cuda")
    text = text_of([run], width=200)
    assert "4 ranks on 2 nodes (a, b), 4 GPUs, 1 NVLink domain" in text
    assert "cross node" in text
    assert "cross domain" not in text


def test_one_node_has_no_such_columns(tmp_path):
    here = one_machine("host", Gpus())(4)
    run = stored(tmp_path / "r", here, traffic(22 * KIB, 0, 0, 1))
    text = text_of([run], width=200)
    assert "22.0 KiB" not in text
    assert "domain" not in text
    assert "on 1 node" not in text
    page = report.html_report([run])
    assert "cross node" not in page.split("</style>")[1].split("<script")[0]


def test_placements_are_told_apart_on_a_page(tmp_path):
    here = one_machine("host", Gpus())(4)
    run = stored(tmp_path / "r", here, traffic(22 * KIB, 0, 0, 1), placement="eplb-1234abcd")
    assert "eplb-1234abcd" in report.html_report([run])
    assert "placement eplb-1234abcd" in text_of([run], width=200)


def test_a_resumed_run_has_the_layout_that_it_began_with(tmp_path):
    run = stored(tmp_path / "r", TWO_HOSTS, traffic(6 * KIB, 16 * KIB, 16 * KIB, 2))
    renamed = Topology.from_ranks([RankPlace(node=n, host=f"other-{n}") for n in "ccdd"])
    refuse_moved_ranks(run, [renamed, TWO_HOSTS.first(2)])
    moved = Topology.from_ranks([RankPlace(node=n, host=n) for n in "abab"])
    with pytest.raises(ResultsError, match=r"4 ranks were elsewhere .*\[0, 0, 1, 1\] against \[0"):
        refuse_moved_ranks(run, [moved])


def test_topologies_of_further_rank_counts_are_kept_beside_the_first(tmp_path):
    stored(tmp_path / "r", TWO_HOSTS, traffic(6 * KIB, 16 * KIB, 16 * KIB, 2))
    run = RunFolder.resume(tmp_path / "r", fake_machine())
    run.keep_topologies([TWO_HOSTS, TWO_HOSTS.first(2)])
    run.finish("done")
    assert RunFolder.open(tmp_path / "r").meta.topologies == [TWO_HOSTS, TWO_HOSTS.first(2)]


def test_a_description_of_an_older_mokbench_has_none():
    told = fake_meta().model_dump(mode="json", exclude={"topologies"}) | {"record_version": 4}
    read = RunMeta.model_validate(told)
    assert read.topologies == []
    assert isinstance(read.machine, Machine)

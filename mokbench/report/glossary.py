"""What the figures of a page mean, in a sentence or two each; docs/metrics.md has the formulas."""

from collections.abc import Iterable

from mokbench.clocks import CLOCK_FLOOR
from mokbench.report import places, wording

# By the title of the column. A page explains those that it shows.
COLUMNS = {
    "step us (95 % CI)": "Time of one layer pass in us, dispatch to combined output: the slowest "
    "rank of each pass, then the median over passes, with the 95 % interval of that median over "
    "blocks of passes. Less is better.",
    "least step time": "The row with the smallest median; whether it is faster than the others is "
    "for the verdict to say.",
    "verdict": "fastest: every other row, measured in turn with it, takes at least "
    f"{wording.FLOOR} longer, and the interval of the ratio excludes 1. not settled: that is not "
    "shown of one of them. alone: nothing to compare with.",
    "others: times as long (95 % CI)": "Step time of each other row over the least, the median "
    "over pairs of blocks measured in turn. ~: not measured in turn, which gives no verdict.",
    "why": "The rows' own figures side by side; no proof of a cause.",
    "ranks": "Processes that share the experts, one a GPU unless the row is marked.",
    "tokens": "Tokens per rank and pass.",
    "routing": "How tokens choose their experts: a generator or a recorded trace.",
    "placement": "Which rank holds which expert, where that is not contiguous.",
    "regime": "isolated: ranks aligned, one pass. steady: passes back to back, only their period. "
    "Two quantities, never compared. graph: replayed from a CUDA graph.",
    "mark": "twin: the protocol on CPUs, no performance. shared GPU: ranks share one GPU; ratios "
    "do not predict NVLink. oversubscribed: more busy threads than cores.",
    "TFLOP/s/GPU": "1e12 FLOP a second and GPU: the three matmuls of the routed rows, no padding.",
    "of peak": "TFLOP/s/GPU over the rate of a large cuBLAS matmul measured in turn with the row.",
    "of roofline": "Step time over the least that the matmul, read and peer-copy rates measured in "
    "the same run allow; 1 is perfect.",
    "link use": "Useful bytes a second over the peer-copy rate measured in the same run: each "
    "(token, rank) pair counts once, so moving more does not look like a win.",
    "wire": "Bytes of hidden vectors that one step moves between ranks, summed over ranks.",
    "nodes": "Machines that the ranks are on, where these are several.",
    places.SAME_DOMAIN: "Wire bytes between ranks of one NVLink domain (on the host fabric: of one "
    "node), where ranks are in several.",
    places.CROSS_DOMAIN: "Wire bytes between ranks of two NVLink domains.",
    places.CROSS_NODE: "Wire bytes between ranks on two nodes, over NVLink or a network.",
    "redundancy": "Wire bytes over useful bytes; 1 is least.",
    "dispatch us": "Sending tokens to their experts alone, from an aligned start, slowest rank. In "
    "a step it may overlap with the rest.",
    "combine us": "Bringing results back alone, from an aligned start, slowest rank. In a step it "
    "may overlap with the rest.",
    "spread us": "How much longer the last rank of a pass takes than the first, the median: "
    "waiting and imbalance together.",
    "min step us": "Step time with one token a rank at one small fixed shape (hidden 2048, "
    "intermediate 256, 16 experts, top 2): what coordinating costs with next to nothing to move.",
    "SM MHz": "SM clock during the samples. Rows whose clocks differ by more than "
    f"{100 * CLOCK_FLOOR:.0f} % are compared in SM cycles too: the difference of clocks is none of "
    "systems.",
    "MMA use": "Cycles that the tensor cores need for the routed rows' FLOPs over the SM cycles of "
    "the step; unlike a share of a peak it does not move with the clock.",
    "hold expired": "Share of samples that began before the CPU had queued the pass, since it "
    "waits for the GPU inside of it: its gaps are in the time, and the GPU's clock is another.",
    "stage": "In the kernel: a rank's CTAs copy its tokens and ids to where peers read them.",
    "entry": "In the kernel: they wait until all ranks have staged.",
    "schedule": "In the kernel: they count all ranks' routes and list the rows of their experts.",
    "dispatch": "In the kernel: rows are pulled from all ranks, from the first CTA that knows the "
    "list to the last row; a rank whose experts get no row has none.",
    "GEMM 1": "In the kernel: gate and up projections with SwiGLU, first tile to last.",
    "GEMM 2": "In the kernel: down projections, whose rows go straight back to their ranks.",
    "combine": "In the kernel: from the end of a rank's own last GEMM 2 until all other ranks have "
    "sent its rows back: mostly a wait for the slowest.",
    "sum": "In the kernel: the weighted sum over a token's k rows.",
    "waited": "What a CTA's GEMMs waited for rows in all during that pass: median / largest over "
    "the rank's CTAs.",
    "rel error": "||y - reference|| / ||reference|| against the FP32 oracle.",
}
# By kind of chart: what to look for.
CHARTS = {
    "step_time": "Points are medians, bars their 95 % intervals; lower is better. Under each "
    "routing is how uneven it is: the fullest expert and rank over the mean.",
    "speedup": "Each field is another system's step time over that of the system named in the "
    "title: above 1, that system takes less time.",
    "signaling": "How long ranks need to tell one another that something is ready, with next to "
    "nothing to move. A line is drawn where growth with the ranks is one; dotted, it is a fit and "
    "no measurement. Hollow points have more threads than cores.",
    "link": "1 is what a plain copy between peers reached in the same run. Useful bytes count each "
    "(token, rank) pair once; wire bytes are all that moved.",
    "imbalance": "Rows that each expert gets, known from the routing before anything runs.",
    "roofline": "1 is the least time that rates measured in the same run allow.",
    "timeline": "The pass whose slowest rank took the median time, each rank on its own clock from "
    "an aligned start. Of rows with phase stamps: the last pass as its kernel saw it, a lane a "
    "rank, the GEMMs below it; hatched is waiting for other ranks.",
}


def explained(titles: Iterable[str]) -> list[tuple[str, str]]:
    """Title and meaning of each column that has one, each once, in the order given."""
    return [(title, COLUMNS[title]) for title in dict.fromkeys(titles) if title in COLUMNS]

# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""A plan as a picture: ranks over time, colour by ring size, white where a rank waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megatron_hdp.planning.replay import Replay
from megatron_hdp.planning.values import Plan

_MOST_ROWS = 64


class Bar(NamedTuple):
    """One micro-batch's forward or backward on one stage of one rank."""

    row: int
    begin_s: float
    end_s: float
    phase: str
    ring: int
    tokens: int


def rows(plan: Plan) -> list[int]:
    """The ranks that are drawn: all, or 64 spread evenly."""
    count = min(plan.num_ranks, _MOST_ROWS)
    return [int(rank) for rank in np.linspace(0, plan.num_ranks - 1, count).round()]


def bars(plan: Plan, replay: Replay) -> Iterator[Bar]:
    """Every bar of the drawn ranks; with pipeline stages, their first stage."""
    for row, rank in enumerate(rows(plan)):
        first = int(plan.first_micro_batch[rank])
        for micro_batch in plan.micro_batches(rank):
            slot = micro_batch.slot
            ring = micro_batch.ring.size if micro_batch.ring else 1
            tokens = int(plan.micro_batch_tokens[first + slot])
            for phase, (begin, end) in (("forward", replay.forward), ("backward", replay.backward)):
                yield Bar(
                    row, float(begin[0, rank, slot]), float(end[0, rank, slot]), phase, ring, tokens
                )


def draw_plan(plan: Plan, replay: Replay, path: str, title: str) -> None:
    """Writes `path`, a .png or a self-contained .html.

    Raises:
        ValueError: another ending.
    """
    heading = (
        f"{title}: predicted step {replay.step_s:.2f} s, waiting "
        f"{100 * float(replay.waited_s.mean()) / replay.step_s:.1f} % of the ranks' time"
    )
    if path.endswith(".png"):
        _draw_png(plan, replay, path, heading)
    elif path.endswith(".html"):
        _draw_html(plan, replay, path, heading)
    else:
        raise ValueError(f"--picture {path}: the name must end in .png or .html")


def _draw_png(plan: Plan, replay: Replay, path: str, heading: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot
    from matplotlib.patches import Patch

    ranks, drawn = rows(plan), list(bars(plan, replay))
    sizes = sorted({bar.ring for bar in drawn})
    color = {size: colormaps["viridis_r"](i / max(1, len(sizes))) for i, size in enumerate(sizes)}
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.16 * len(ranks)), layout="constrained")
    for bar in drawn:
        axes.barh(bar.row, bar.end_s - bar.begin_s, left=bar.begin_s, height=0.8,
                  color=color[bar.ring], alpha=1.0 if bar.phase == "forward" else 0.6,
                  edgecolor="white", linewidth=0.3)  # fmt: skip
    every = max(1, len(ranks) // 16)
    axes.set_yticks(range(0, len(ranks), every), [str(rank) for rank in ranks[::every]])
    axes.invert_yaxis()
    axes.set_xlim(0, replay.step_s)
    axes.set_xlabel("seconds in the step (predicted)")
    axes.set_ylabel("HDP rank")
    axes.set_title(heading, loc="left", fontsize=10)
    handles = [Patch(color=color[s], label="local" if s == 1 else f"ring of {s}") for s in sizes]
    handles.append(Patch(color="grey", alpha=0.6, label="paler: backward"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_html(plan: Plan, replay: Replay, path: str, heading: str) -> None:
    data = {
        "heading": heading,
        "step": replay.step_s,
        "ranks": rows(plan),
        "bars": [
            [b.row, round(b.begin_s, 5), round(b.end_s, 5), int(b.phase == "backward"), b.ring,
             b.tokens] for b in bars(plan, replay)
        ],
    }  # fmt: skip
    with open(path, "w") as stream:
        stream.write(_PAGE.replace("/*DATA*/", json.dumps(data)))


_PAGE = """<!doctype html><meta charset="utf-8"><title>HDP plan</title>
<style>body{font:14px sans-serif;margin:16px}#tip{height:1.4em;color:#333}
canvas{border:1px solid #ccc}
#key span{display:inline-block;margin-right:12px}#key i{display:inline-block;width:12px;height:12px;
margin-right:4px}</style>
<h3 id="head"></h3><div id="key"></div>
<p id="tip">point at a bar; the wheel zooms, dragging moves</p>
<canvas id="c"></canvas>
<script>const D=/*DATA*/;
const c=document.getElementById('c'),g=c.getContext('2d'),
H=Math.max(5,Math.min(18,640/D.ranks.length)),
L=60,W=Math.max(600,innerWidth-60);c.width=W;c.height=H*D.ranks.length+40;
let x0=0,x1=D.step;document.getElementById('head').textContent=D.heading;
const sizes=[...new Set(D.bars.map(b=>b[4]))].sort((a,b)=>a-b);
const hue=s=>`hsl(${sizes.length<2?210:60+240*sizes.indexOf(s)/(sizes.length-1)},60%,45%)`;
document.getElementById('key').innerHTML=sizes.map(s=>`<span><i style="background:${hue(s)}"></i>${
s>1?'ring of '+s:'local'}</span>`).join('')+'<span>paler: backward; white: waiting</span>';
const X=t=>L+(t-x0)/(x1-x0)*(W-L-10);
function draw(){g.clearRect(0,0,W,c.height);g.font='11px sans-serif';
for(const b of D.bars){if(b[2]<x0||b[1]>x1)continue;g.globalAlpha=b[3]?0.55:1;g.fillStyle=hue(b[4]);
const a=Math.max(L,X(b[1]));g.fillRect(a,b[0]*H,Math.max(.5,X(b[2])-a-.5),H-1)}
g.globalAlpha=1;g.fillStyle='#000';const e=Math.ceil(12/H);
D.ranks.forEach((r,i)=>{if(i%e==0)g.fillText('rank '+r,2,i*H+Math.min(H,11))});
for(let i=0;i<=10;i++){const t=x0+(x1-x0)*i/10;g.fillText(t.toFixed(2)+' s',X(t)-12,c.height-14)}}
c.onmousemove=e=>{const r=c.getBoundingClientRect(),t=x0+(e.clientX-r.left-L)/(W-L-10)*(x1-x0),
row=Math.floor((e.clientY-r.top)/H);if(e.buttons){const d=-e.movementX/(W-L-10)*(x1-x0);x0+=d;
x1+=d;draw();return}const b=D.bars.find(b=>b[0]==row&&b[1]<=t&&t<b[2]);
document.getElementById('tip').textContent=b?`rank ${D.ranks[row]}: ${b[3]?'backward':'forward'}, ${
b[4]>1?'ring of '+b[4]:'local'}, ${b[5]} tokens, ${b[1].toFixed(3)}-${b[2].toFixed(3)} s`:
`${t.toFixed(3)} s`};
c.onwheel=e=>{e.preventDefault();const r=c.getBoundingClientRect(),
t=x0+(e.clientX-r.left-L)/(W-L-10)*(x1-x0),
f=e.deltaY<0?.8:1.25;x0=t-(t-x0)*f;x1=t+(x1-t)*f;draw()};draw();</script>"""

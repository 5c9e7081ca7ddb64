# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
"""The HTML timeline in a real browser: it draws, zooms and tells what the plan says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_hdp.observability.picture import draw
from megatron_hdp.observability.timeline import Timeline, of_plan
from megatron_hdp.planning.replay import replay
from tests.simulation.helpers import COST, plan_of

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
RANKS, STAGES = 6, 2

DRIVER = """
<script>
const before = document.querySelector('.plot').getAttribute('viewBox');
const send = (type, where, more) => {
  const options = {bubbles: true, cancelable: true, clientX: where.x, clientY: where.y, ...more};
  where.target.dispatchEvent(new (type == 'wheel' ? WheelEvent : MouseEvent)(type, options));
};
const box = document.querySelectorAll('.plot')[1].parentNode.querySelector('.frame')
  .getBoundingClientRect();
const where = {target: document.querySelectorAll('.plot')[1], x: box.left + 2, y: box.top + 2};
send('mousemove', where);
const seen = [document.getElementById('tip').textContent, before];
send('wheel', where, {deltaY: -100});
seen.push(document.querySelector('.plot').getAttribute('viewBox'));
send('mousemove', where, {buttons: 1, movementX: -40});
seen.push(document.querySelector('.plot').getAttribute('viewBox'));
send('dblclick', where);
seen.push(document.querySelector('.plot').getAttribute('viewBox'));
document.body.insertAdjacentHTML('beforeend',
  seen.map(text => `<pre class="seen">${text}</pre>`).join(''));
</script>
"""


def _timelines() -> list[Timeline]:
    ring = plan_of(RANKS, rings=[(tuple(range(RANKS)), 0, 6000)])
    apart = plan_of(RANKS, rings=[((0, 1), 0, 4000)],
                    local=[(rank, 0, 700) for rank in range(2, RANKS)])  # fmt: skip
    return [
        of_plan(title, plan, replay(plan, COST, STAGES))
        for title, plan in (("static </script><b>", ring), ("auto", apart))
    ]


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
def test_a_browser_draws_zooms_and_tells(tmp_path: Path):
    timelines = _timelines()
    path = tmp_path / "page.html"
    draw(timelines, str(path), heading="a plan", note="of a test")
    text = path.read_text()
    assert "http" not in text, "not self-contained"
    path.write_text(text + DRIVER)
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1200,800",
         "--virtual-time-budget=2000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    page = done.stdout
    assert len(re.findall(r'<g class="row" data-row="\d+"', page)) == 2 * RANKS * STAGES
    assert re.findall(r"<h2>(.*?)</h2>", page)[0].startswith("static &lt;/script&gt;&lt;b&gt;: ")
    ratio = timelines[0].step_s / timelines[1].step_s
    assert f"{ratio:.2f} times as fast</h2>" in page
    for words in ("rank 0 stage 0", "ring of 6", "ring of 2", "local", "backward", "waiting"):
        assert words in page
    drawn = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)  # the driver's own words
    seen = re.findall(r'<pre class="seen">(.*?)</pre>', drawn, re.DOTALL)
    tip, whole, zoomed, moved, again = seen
    assert tip.startswith("rank 0 stage 0, at ")
    assert "micro-batch 0, forward, ring of 2\n2,000 tokens on this rank\n" in tip
    views = [[float(part) for part in view.split()] for view in (whole, zoomed, moved, again)]
    assert views[1][2] == pytest.approx(0.8 * views[0][2])
    assert views[2][0] > views[1][0]
    assert views[2][2] == pytest.approx(views[1][2])
    assert views[3] == views[0]


def test_another_ending_is_refused():
    with pytest.raises(ValueError, match=r"x.gif: the name must end in .png or .html"):
        draw(_timelines(), "x.gif")

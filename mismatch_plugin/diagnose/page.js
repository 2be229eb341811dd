"use strict";
/* What a setting would do, from sums by bin: exact where the bounds are edges of the bins.
   of: columns of one level, bin i below edge i. lower, upper: places in edges; -1 and edges.length: none.
   mode: truncate, clip, mask, or reject (weight 1 inside the bounds, nothing outside: its ESS is that of tokens). */
function recompute(edges, of, mode, lower, upper) {
  const lo = lower < 0 ? 0 : Math.exp(edges[lower]);
  const hi = upper >= edges.length ? Math.exp(20) : Math.exp(edges[upper]);
  let units = 0, sum = 0, squares = 0, byToken = 0;
  const all = { tokens: 0, positive: 0, negative: 0 }, kept = { tokens: 0, positive: 0, negative: 0 };
  for (let k = 0; k < of.bins.length; k++) {
    const below = of.bins[k] <= lower, above = of.bins[k] > upper;
    units += of.units[k];
    for (const name in all) all[name] += of[name][k];
    if ((mode === "mask" || mode === "reject") && (below || above)) continue;
    for (const name in kept) kept[name] += of[name][k];
    const flat = mode === "reject" ? 1 : above ? hi : below && mode === "clip" ? lo : null;
    sum += flat === null ? of.ratio[k] : flat * of.units[k];
    squares += flat === null ? of.squared[k] : flat * flat * of.units[k];
    byToken += flat === null ? of.by_token[k] : flat * of.tokens[k];
  }
  const share = (part, whole) => whole ? part / whole : null;
  return {
    kept: share(kept.tokens, all.tokens), kept_positive: share(kept.positive, all.positive),
    kept_negative: share(kept.negative, all.negative), mean_weight: share(byToken, kept.tokens),
    ess: mode === "reject" ? share(kept.tokens, all.tokens) : squares ? sum * sum / (units * squares) : 0,
  };
}

/* Units of one level in 90 equal bars around 0, wide enough for the bounds (log-ratios) and for all but the outermost
   1e-4 of the units; what lies further out than four times these, or than eight times a bound, is beyond the picture. */
function bars(edges, of, bounds) {
  const ends = [edges[0] - 1, ...edges, edges[edges.length - 1] + 1], below = [0];
  const units = new Map(of.bins.map((bin, k) => [bin, of.units[k]]));
  for (let i = 0; i < ends.length - 1; i++) below.push(below[i] + (units.get(i) || 0));
  const total = below[below.length - 1];
  const at = (x, from, to) => {
    const i = from.findIndex((value) => value >= x);
    if (i < 1) return i < 0 ? to[to.length - 1] : to[0];
    return to[i - 1] + (to[i] - to[i - 1]) * (x - from[i - 1]) / (from[i] - from[i - 1]);
  };
  const far = Math.max(...[of.bins[0], of.bins[of.bins.length - 1] + 1].map((i) => Math.abs(ends[i])));
  const near = Math.max(...[1e-4, 1 - 1e-4].map((share) => Math.abs(at(share * total, below, ends))));
  const data = Math.min(far, 4 * near);
  const extent = 1.08 * Math.max(data, 1e-6, ...bounds.map(Math.abs).filter((bound) => bound < 8 * data));
  const counts = [], places = Array.from({ length: 91 }, (_, i) => extent * (i / 45 - 1));
  const reached = places.map((place) => at(place, ends, below));
  for (let i = 0; i < 90; i++) counts.push(reached[i + 1] - reached[i]);
  return { places, counts, total, beyond: [reached[0], total - reached[90]].map(Math.round) };
}

const LEFT = 48, WIDTH = 464, TOP = 24, BOTTOM = 236;

/* The bars with ticks and with what lies outside of the bounds (log-ratios, or null) pale. */
function draw(svg, edges, of, bounds, shown) {
  const drawn = svg.drawn = bars(edges, of, shown), end = drawn.places[90];
  const powers = Math.max(1, Math.ceil(Math.log10(Math.max(...drawn.counts))));
  const x = (value) => LEFT + WIDTH * (value + end) / (2 * end);
  const y = (count) => BOTTOM - (BOTTOM - TOP) * Math.max(0, Math.log10(2 * count)) / Math.log10(2 * 10 ** powers);
  const text = (x, y, anchor, said) => `<text x="${x}" y="${y}" text-anchor="${anchor}">${said}</text>`;
  const line = (kind, x1, x2, y1, y2) => `<line class="${kind}" x1="${x1}" x2="${x2}" y1="${y1}" y2="${y2}"/>`;
  const rect = (kind, from, to, top) => `<rect class="${kind}" x="${from}" width="${to - from}" y="${top}" height="${BOTTOM - top}"/>`;
  const parts = [], [left, right] = drawn.beyond, beyond = left + right ? [`${left} on the left, ${right} on the right`] : [];
  for (let n = 0; n <= powers; n += 1 + Math.floor(powers / 6)) {
    parts.push(line("grid-line", LEFT, LEFT + WIDTH, y(10 ** n), y(10 ** n)));
    parts.push(text(LEFT - 6, y(10 ** n) + 4, "end", 10 ** (n % 3) + ["", "k", "M", "G"][Math.floor(n / 3)]));
  }
  const rough = 2 * end / 9, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  for (let k = Math.ceil(-end / step); k * step <= end; k++) {
    parts.push(line("axis", x(k * step), x(k * step), BOTTOM, BOTTOM + 4));
    parts.push(text(x(k * step), BOTTOM + 18, "middle", String(Number((k * step).toPrecision(6))).replace("-", "−")));
  }
  drawn.counts.forEach((count, i) => parts.push(rect("bar-of", x(drawn.places[i]), x(drawn.places[i + 1]), y(count))));
  ["lower", "upper"].forEach((side, i) => {
    if (bounds[i] === null) return;
    const at = x(Math.min(end, Math.max(-end, bounds[i])));
    parts.push(i ? rect("out", at, LEFT + WIDTH, TOP) : rect("out", LEFT, at, TOP));
    const said = `${side} ${Number(Math.exp(bounds[i]).toPrecision(6))}`;
    if (Math.abs(bounds[i]) > end) return void beyond.push(`${said} of the bounds`);
    parts.push(line("bound", at, at, TOP - 4, BOTTOM));
    parts.push(text(at, TOP - 9, at < LEFT + 60 ? "start" : at > LEFT + WIDTH - 60 ? "end" : "middle", said));
  });
  parts.push(line("axis", LEFT, LEFT + WIDTH, BOTTOM, BOTTOM), text(LEFT + WIDTH / 2, 276, "middle", "log-ratio, nat"));
  svg.innerHTML = parts.join("") + `<rect class="cursor off" width="${WIDTH / 90}" y="${TOP}" height="${BOTTOM - TOP}"/>`;
  svg.parentNode.querySelector(".beyond").textContent = beyond.length ? `Beyond the picture: ${beyond.join("; ")}.` : "";
}

function percent(value) {
  if (value === null) return "–";
  if (value === 0 || value === 1) return `${100 * value} %`;
  for (const digits of [1, 2, 3, 4]) {
    const shown = (100 * value).toFixed(digits);
    if (Number(shown) !== 0 && Number(shown) !== 100) return `${shown} %`;
  }
  return value > 0.5 ? "> 99.9999 %" : "< 0.0001 %";
}

function start(document) {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, root) => [...(root || document).querySelectorAll(selector)];
  document.documentElement.classList.add("js");

  const host = document.getElementById("host");
  const choose = () => all(".panel").forEach((panel) => panel.classList.toggle("off", panel.dataset.host !== host.value));
  if (host) host.addEventListener("change", choose), choose();
  for (const button of all("button.copy")) button.addEventListener("click", async () => {
    const source = button.previousElementSibling;
    getSelection().selectAllChildren(source);
    let done = true;
    try { await navigator.clipboard.writeText(source.textContent); } catch { done = document.execCommand("copy"); }
    button.textContent = done ? "Copied" : "Selected: press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2500);
  });

  /* A picture tells what is under the pointer, or under the arrow keys. */
  for (const svg of all(".distribution svg")) {
    const said = document.getElementById(svg.getAttribute("aria-describedby")), first = said.textContent;
    let at = -1;
    const show = (i) => {
      const { places, counts, total } = svg.drawn, cursor = svg.querySelector(".cursor");
      at = i >= 0 && i < counts.length ? i : -1;
      cursor.classList.toggle("off", at < 0);
      cursor.setAttribute("x", LEFT + at * WIDTH / counts.length);
      if (at < 0) return void (said.textContent = first);
      const [a, b] = [places[at], places[at + 1]], count = counts[at];
      const many = count < 0.05 ? "none" : `about ${Math.max(1, Math.round(count))} of ${total} (${percent(count / total)})`;
      said.textContent = `log-ratio ${a.toPrecision(3)} to ${b.toPrecision(3)}, ratio ${Math.exp(a).toPrecision(4)} to ${Math.exp(b).toPrecision(4)}: ${many}`;
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = Math.min(box.width / 520, box.height / 284);
      show(Math.floor(((event.clientX - box.left - box.width / 2) / scale + 260 - LEFT) / WIDTH * 90));
    });
    for (const left of ["pointerleave", "blur"]) svg.addEventListener(left, () => show(-1));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") show(-1);
      if (!step) return;
      event.preventDefault();
      show(at < 0 ? 45 : Math.min(89, Math.max(0, at + step)));
    });
  }

  /* A column's button sorts by it, and the second time the other way round. */
  for (const head of all("table.sortable th[aria-sort]")) head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending", body = head.closest("table").tBodies[0];
    all("th", head.parentNode).forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = ({ textContent, dataset: { value } }) => value === undefined ? textContent : value === "" ? -Infinity : Number(value);
    const keyed = [...body.rows].map((row) => [key(row.cells[head.cellIndex]), row]);
    keyed.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1)).forEach(([, row]) => body.append(row));
  });

  if (data) controls(document, data, all);
}

/* The first picture, and level, mode and bounds over the user's own data where settings are predicted. */
function controls(document, data, all) {
  const { edges, levels, settings, first } = data;
  const logs = (...items) => items.flatMap(({ lower, upper }) => [lower, upper]).map((bound) => bound === null ? null : Math.log(bound));
  const there = (bounds) => bounds.filter((bound) => bound !== null);
  draw(document.getElementById("distribution"), edges, levels[first.level], logs(first), there(logs(first)));
  if (!document.getElementById("try")) return;
  const form = document.getElementById("try").elements;
  const above = edges.findIndex((edge) => edge > 0), none = { lower: -1, upper: edges.length };
  Object.assign(form.lower, { min: -1, max: above - 1 });
  Object.assign(form.upper, { min: above, max: edges.length });
  const set = (side, bound) => {
    const log = Math.log(bound);
    const nearest = () => edges.reduce((best, edge, i) => Math.abs(edge - log) < Math.abs(edges[best] - log) ? i : best, 0);
    form[side].value = bound > 0 ? nearest() : none[side];
  };
  const update = () => {
    const level = form.level.value, reject = all("[name=mode][value=reject]")[0];
    reject.disabled = !data.judged.includes(level);  // no criterion judges turns or prefixes
    if (reject.disabled && reject.checked) form.mode.value = "mask";
    const mode = form.mode.value, places = { lower: mode === "truncate" ? -1 : Number(form.lower.value), upper: Number(form.upper.value) };
    form.lower.disabled = form.lower_value.disabled = mode === "truncate";
    for (const side in places) {
      const edge = edges[places[side]], shown = edge === undefined ? "" : Number(Math.exp(edge).toPrecision(7));
      form[`${side}_value`].value = shown;
      form[side].setAttribute("aria-valuetext", `${side} bound ${shown || "none"}`);
    }
    const found = recompute(edges, levels[level], mode, places.lower, places.upper);
    for (const cell of all("[data-now]")) {
      const value = found[cell.dataset.now];
      cell.textContent = cell.dataset.now !== "mean_weight" ? percent(value) : value === null ? "–" : Number(value.toPrecision(4));
    }
    const svg = document.getElementById("tried"), bounds = [edges[places.lower] ?? null, edges[places.upper] ?? null];
    draw(svg, edges, levels[level], bounds, there(logs(...settings.filter((item) => item.level === level))));
    svg.setAttribute("aria-label", `Log-ratios of ${data.units[level]}. Arrow keys read the bars.`);
  };
  const load = () => {
    const item = settings[Number(form.from.value)];
    for (const name of ["level", "mode"]) form[name].value = item[name];
    for (const side of ["lower", "upper"]) set(side, item[side]);
    update();
  };
  form.from.addEventListener("change", load);
  for (const control of [...form.level, ...form.mode, form.lower, form.upper]) control.addEventListener("input", update);
  for (const side of ["lower", "upper"]) form[`${side}_value`].addEventListener("change", () => {
    set(side, Number(form[`${side}_value`].value));
    update();
  });
  load();
}

if (typeof document !== "undefined") start(document);

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

function start(document) {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, root) => [...(root || document).querySelectorAll(selector)];
  const one = (selector, root) => (root || document).querySelector(selector);
  const text = (element, value) => { if (element && element.textContent !== value) element.textContent = value; };
  const short = (value) => value === null || value === undefined ? "–" : String(Number(Number(value).toPrecision(4)));
  const percent = (value) => {
    if (value === null || value === undefined) return "–";
    if (value === 0 || value === 1) return `${100 * value} %`;
    for (const digits of [1, 2, 3, 4]) {
      const shown = (100 * value).toFixed(digits);
      if (Number(shown) !== 0 && Number(shown) !== 100) return `${shown} %`;
    }
    return value > 0.5 ? "> 99.9999 %" : "< 0.0001 %";
  };
  document.documentElement.classList.add("js");

  /* Tabs: arrow keys move between them. */
  for (const list of all("[role=tablist]")) {
    const tabs = all("[role=tab]", list);
    const choose = (tab, focus) => {
      for (const other of tabs) {
        other.setAttribute("aria-selected", String(other === tab));
        other.tabIndex = other === tab ? 0 : -1;
        document.getElementById(other.getAttribute("aria-controls")).classList.toggle("off", other !== tab);
      }
      if (focus) tab.focus();
    };
    tabs.forEach((tab, i) => {
      tab.addEventListener("click", () => choose(tab, false));
      tab.addEventListener("keydown", (event) => {
        const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        choose(tabs[(to + tabs.length) % tabs.length], true);
      });
    });
    choose(tabs.find((tab) => tab.getAttribute("aria-selected") === "true") || tabs[0], false);
  }

  for (const button of all("button.copy")) {
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.of);
      let done = true;
      try { await navigator.clipboard.writeText(source.textContent); } catch {
        const range = document.createRange();
        range.selectNodeContents(source);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        done = document.execCommand("copy");
      }
      text(button, done ? "Copied" : "Selected: press Ctrl+C");
      setTimeout(() => text(button, "Copy"), 2500);
    });
  }

  /* A picture tells what is under the pointer, or under the arrow keys. */
  for (const svg of all("svg[data-bars]")) {
    const of = data.distributions[svg.dataset.bars], said = document.getElementById(svg.getAttribute("aria-describedby"));
    const first = said.textContent, mark = one(".cursor", svg), n = of.counts.length;
    const left = Number(svg.dataset.left), width = Number(svg.dataset.width) / n;
    const total = of.counts.reduce((a, b) => a + b, of.beyond[0] + of.beyond[1]);
    let at = -1;
    const show = (i) => {
      at = i;
      mark.classList.toggle("off", i < 0);
      if (i < 0) return text(said, first);
      mark.setAttribute("x", left + i * width);
      mark.setAttribute("width", width);
      const [a, b] = [of.edges[i], of.edges[i + 1]], count = of.counts[i];
      const many = count < 0.05 ? "none" : `about ${Math.max(1, Math.round(count))} of ${Math.round(total)} (${percent(count / total)})`;
      text(said, `log-ratio ${a.toPrecision(3)} to ${b.toPrecision(3)}, ratio ${Math.exp(a).toPrecision(4)} to ${Math.exp(b).toPrecision(4)}: ${many}`);
    };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      const i = Math.floor((x - left) / width);
      show(i >= 0 && i < n ? i : -1);
    });
    svg.addEventListener("pointerleave", () => show(-1));
    svg.addEventListener("blur", () => show(-1));
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") show(-1);
      if (!step) return;
      event.preventDefault();
      show(at < 0 ? Math.floor(n / 2) : Math.min(n - 1, Math.max(0, at + step)));
    });
  }

  /* A column's button sorts by it, and the second time the other way round. */
  for (const table of all("table.sortable")) {
    const heads = all("th[aria-sort]", table), body = table.tBodies[0];
    heads.forEach((head) => one("button", head).addEventListener("click", () => {
      const column = head.cellIndex, down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => {
        const value = row.cells[column].dataset.value, number = Number(value);
        return value === undefined ? row.cells[column].textContent : value === "" ? -Infinity : number;
      };
      [...body.rows].sort((a, b) => {
        const [x, y] = down ? [key(b), key(a)] : [key(a), key(b)];
        return x < y ? -1 : x > y ? 1 : 0;
      }).forEach((row) => body.append(row));
    }));
  }

  const figure = document.getElementById("bar-figure");
  if (figure) figure.addEventListener("change", () => {
    for (const chart of all(".bars")) {
      const rows = all("[data-figures]", chart).map((row) => [row, JSON.parse(row.dataset.figures)[figure.value]]);
      const most = Math.max(...rows.map(([, value]) => Math.abs(value)), 1e-300);
      for (const [row, value] of rows) {
        one(".bar i", row).style.width = `${100 * Math.abs(value) / most}%`;
        text(one(".value", row), figure.value === "ess" ? percent(value) : String(Number(value.toPrecision(3))));
      }
    }
  });

  if (data.levels) controls(document, data, { all, one, text, percent, short });

  /* On paper everything is open. */
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])");
    closed.forEach((part) => { part.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((part) => { part.open = false; }));
}

/* Level, mode and bounds over the user's own data. */
function controls(document, data, { all, one, text, percent, short }) {
  const edges = data.edges, form = document.getElementById("try"), last = edges.length;
  const inputs = { lower: form.elements.lower, upper: form.elements.upper };
  const typed = { lower: form.elements.lower_value, upper: form.elements.upper_value };
  const ratio = (place) => Number(Math.exp(edges[place]).toPrecision(7));
  const nearest = (value) => {
    const wanted = Math.log(value);
    let best = 0;
    edges.forEach((edge, i) => { if (Math.abs(edge - wanted) < Math.abs(edges[best] - wanted)) best = i; });
    return best;
  };
  const firstAbove = edges.findIndex((edge) => edge > 0);
  const place = (side) => {
    const value = Number(inputs[side].value);
    if (side === "lower") return value <= Number(inputs.lower.min) ? -1 : value;
    return value >= Number(inputs.upper.max) ? last : value;
  };
  const set = (side, bound) => {
    const none = side === "lower" ? inputs.lower.min : inputs.upper.max;
    inputs[side].value = bound === null ? none : String(nearest(bound));
  };
  /* From the outermost data, or a bound that some setting has there, inwards over three powers of ten. */
  const range = (level) => {
    const bins = data.levels[level].bins, of = data.settings.filter((item) => item.level === level);
    const out = (sign) => {
      const ends = of.flatMap((item) => [item.lower, item.upper]).filter((b) => b !== null).map((b) => sign * Math.log(b));
      const edge = sign < 0 ? edges[Math.max(0, Math.min(bins[0] - 1, firstAbove - 2))]
        : edges[Math.min(last - 1, Math.max(bins[bins.length - 1], firstAbove + 1))];
      return Math.max(sign * edge, ...ends);
    };
    const low = out(-1), high = out(1);
    const most = Math.max(low, high);
    inputs.lower.min = Math.max(0, nearest(Math.exp(-most)) - 1);
    inputs.lower.max = Math.min(firstAbove - 1, nearest(Math.exp(-most / 1000)));
    inputs.upper.min = Math.max(firstAbove, nearest(Math.exp(most / 1000)));
    inputs.upper.max = Math.min(last - 1, nearest(Math.exp(most)) + 1);
  };
  const same = (item, level, mode, lower, upper) => item.level === level && item.mode === mode
    && (mode === "truncate" || (item.lower === null ? lower < 0 : nearest(item.lower) === lower))
    && (item.upper === null ? upper >= last : nearest(item.upper) === upper);
  const update = () => {
    const level = form.elements.level.value, reject = one("[name=mode][value=reject]", form);
    reject.disabled = !data.judged.includes(level);  // no criterion judges turns or prefixes
    if (reject.disabled && reject.checked) form.elements.mode.value = "mask";
    const mode = form.elements.mode.value;
    const lower = mode === "truncate" ? -1 : place("lower"), upper = place("upper");
    inputs.lower.disabled = typed.lower.disabled = mode === "truncate";
    const names = { lower: lower < 0 ? "none" : ratio(lower), upper: upper >= last ? "none" : ratio(upper) };
    for (const side of ["lower", "upper"]) {
      typed[side].value = names[side] === "none" ? "" : names[side];
      inputs[side].setAttribute("aria-valuetext", `${side} bound ${names[side]}`);
    }
    let shown = recompute(edges, data.levels[level], mode, lower, upper);
    const items = data.settings.filter((item) => item.figures && same(item, level, mode, lower, upper));
    const exact = items.find((item) => item.recommended) || items[0];
    if (exact) shown = { ...shown, ...exact.figures };
    for (const name of ["kept", "kept_positive", "kept_negative", "ess"]) {
      text(one(`[data-now=${name}]`, document), percent(shown[name]));
    }
    text(one("[data-now=mean_weight]", document), short(shown.mean_weight));
    const near = Math.min(last - 1, Math.max(1, upper)), step = edges[near] - edges[near - 1];
    text(document.getElementById("exactness"), exact
      ? `These bounds are those of “${exact.name}”: the figures are its prediction, with all else that it sets.`
      : `Weights and rejection by these bounds alone. Bounds move in steps of ${short(Number(step.toPrecision(2)))} of the log-ratio here; at every step the figures are exact.`);
    for (const picture of all("#try-pictures figure")) picture.classList.toggle("off", picture.dataset.level !== level);
    const svg = one(`#try-pictures figure[data-level="${level}"] svg`, document);
    if (!svg) return;
    const of = data.distributions[svg.dataset.bars], left = Number(svg.dataset.left), width = Number(svg.dataset.width);
    const x = (value) => left + width * Math.min(1, Math.max(0, (value - of.edges[0]) / (of.edges[of.edges.length - 1] - of.edges[0])));
    const [a, b] = [lower < 0 ? left : x(edges[lower]), upper >= last ? left + width : x(edges[upper])];
    const put = (name, from, to) => {
      one(`.${name}`, svg).setAttribute("x", from);
      one(`.${name}`, svg).setAttribute("width", Math.max(0, to - from));
    };
    put("out-low", left, a);
    put("out-high", b, left + width);
    for (const [name, at, none] of [["line-low", a, lower < 0], ["line-high", b, upper >= last]]) {
      const line = one(`.${name}`, svg);
      line.classList.toggle("off", none);
      line.setAttribute("x1", at);
      line.setAttribute("x2", at);
    }
  };
  const load = (item) => {
    form.elements.level.value = item.level;
    form.elements.mode.value = item.mode;
    range(item.level);
    set("lower", item.lower);
    set("upper", item.upper);
    update();
  };
  const from = form.elements.from;
  from.addEventListener("change", () => load(data.settings[Number(from.value)]));
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const radio of all("[name=level]", form)) radio.addEventListener("change", () => {
    const bounds = ["lower", "upper"].map((side) => typed[side].value ? Number(typed[side].value) : null);
    range(radio.value);
    set("lower", bounds[0]);
    set("upper", bounds[1]);
    update();
  });
  for (const radio of all("[name=mode]", form)) radio.addEventListener("change", update);
  for (const side of ["lower", "upper"]) {
    inputs[side].addEventListener("input", update);
    typed[side].addEventListener("change", () => {
      const value = Number(typed[side].value);
      set(side, value > 0 && (side === "lower" ? value < 1 : value > 1) ? value : null);
      update();
    });
  }
  load(data.settings[Number(from.value)]);
}

if (typeof document !== "undefined") start(document);

"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const SHOWN = 10;  // prompts
  const OPEN = 10;  // completions of a prompt

  // A file opened from a folder may have no storage: then nothing is remembered, and that is all.
  const store = (area, key, value) => {
    try {
      const place = window[area];
      if (value === undefined) return place.getItem(key);
      place.setItem(key, value);
    } catch { return null; }
    return null;
  };

  // Theme: that of the system, until a reader chooses another.
  const themeButton = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const nameTheme = () => { themeButton.textContent = isDark() ? "Light" : "Dark"; };
  const chosen = store("localStorage", "evo-grpo-theme");
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  nameTheme();
  const colours = () => {
    const style = getComputedStyle(root);
    const of = (name) => style.getPropertyValue(name).trim();
    return { ink: of("--ink"), paper: of("--raised"), line: of("--line"), page: of("--paper") };
  };

  // Figures: drawn when they come near the window, so that a page of many opens at once.
  const drawn = new Map();
  const focus = new Set();
  const faded = (name) => focus.size > 0 && /^agent \d+$/.test(name || "") && !focus.has(name);
  const themed = (layout, width, named) => {
    const { ink, paper, line, page } = colours();
    const out = structuredClone(layout);
    const base = out.template.layout;
    const narrow = width < 640;
    base.font.color = ink;
    base.hoverlabel = { ...base.hoverlabel, bgcolor: paper, bordercolor: line, font: { color: ink } };
    // On a phone there is no room for labels on the edges of a tree: a touch shows them.
    out.annotations = (out.annotations || []).filter((one) =>
      !narrow || !/ mutation$/.test(one.name || ""));
    for (const one of out.annotations) {
      if (one.bgcolor) one.bgcolor = page;
      if (faded((one.name || "").replace(" mutation", ""))) one.opacity = 0.2;
      if (narrow) one.font = { ...one.font, size: 10 };
    }
    if (narrow) out.margin = { ...out.margin, l: 44, r: Math.min(out.margin.r, 92) };
    if (narrow && out.showlegend !== false) {
      // Below the figure, which grows by what its names take.
      const rows = Math.ceil(named / 2);
      out.legend = { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom", font: { size: 11 } };
      out.margin = { ...out.margin, r: 8, b: 56 + 22 * rows };
      out.height += 22 * rows;
    }
    return out;
  };
  const CONFIG = {
    responsive: true, displaylogo: false,
    displayModeBar: window.matchMedia("(hover: hover) and (min-width: 50rem)").matches ? "hover" : false,
    modeBarButtons: [["toImage", "resetScale2d"]],
  };
  const draw = (place) => {
    const source = document.getElementById(`figure-${place.dataset.figure}`);
    const figure = drawn.get(place) || JSON.parse(source.textContent);
    const named = figure.data.filter((trace) => trace.name && trace.showlegend !== false).length;
    const layout = themed(figure.layout, place.clientWidth, named);
    place.style.minHeight = `${layout.height}px`;
    drawn.set(place, figure);
    const traces = figure.data.map((trace) =>
      (faded(trace.legendgroup) ? { ...trace, opacity: 0.1 } : trace));
    return window.Plotly.react(place, traces, layout, CONFIG).then(() => {
      place.dataset.drawn = "yes";
    });
  };
  const redraw = () => drawn.forEach((_, place) => { draw(place); });
  const places = [...document.querySelectorAll(".chart")];
  // One after another, with a pause for the reader between two.
  const waiting = [];
  const next = () => {
    const place = waiting.shift();
    if (place) draw(place).then(() => window.setTimeout(next, 0));
  };
  const enqueue = (place) => {
    if (waiting.push(place) === 1) window.setTimeout(next, 0);
  };
  if ("IntersectionObserver" in window) {
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) { near.unobserve(entry.target); enqueue(entry.target); }
      }
    }, { rootMargin: "200px" });
    places.forEach((place) => near.observe(place));
  } else places.forEach(enqueue);
  for (const button of document.querySelectorAll(".page-legend button")) {
    button.addEventListener("click", () => {
      const name = button.dataset.agent;
      if (!focus.delete(name)) focus.add(name);
      button.setAttribute("aria-pressed", String(focus.has(name)));
      redraw();
    });
  }
  window.addEventListener("beforeprint", () => places.forEach((p) => drawn.has(p) || draw(p)));

  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    store("localStorage", "evo-grpo-theme", root.dataset.theme);
    nameTheme();
    redraw();
  });
  dark.addEventListener("change", () => { nameTheme(); redraw(); });

  // Tables: sorted by what a cell says of its value; cells without one stay last.
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const value = (row) => row.cells[column].dataset.value;
        const rows = [...body.rows].sort((a, b) => {
          const x = value(a), y = value(b);
          if (x === "" || y === "") return (x === "") - (y === "");
          const p = Number(x), q = Number(y);
          const order = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q;
          return up ? order : -order;
        });
        body.append(...rows);
      });
    });
  }

  // Completions: whatever they hold is set as text and never as markup.
  const list = document.getElementById("completions-list");
  if (list) {
    const search = document.getElementById("search");
    const agent = document.getElementById("agent");
    const order = document.getElementById("order");
    const more = document.getElementById("more");
    const told = document.getElementById("matches");
    const rows = data.completions.rows;
    const known = [...new Set(rows.map((row) => row.agent))].sort((a, b) => a - b);
    for (const one of known) agent.add(new Option(`agent ${one}`, String(one)));
    for (const field of [search, agent, order]) {
      const kept = store("sessionStorage", `evo-grpo-${field.id}`);
      if (kept) field.value = kept;
    }
    let limit = SHOWN;
    const element = (tag, name, text) => {
      const made = document.createElement(tag);
      if (name) made.className = name;
      made.textContent = text;
      return made;
    };
    const shown = (row) => {
      const box = element("div", "completion", "");
      const meta = element("div", "meta", "");
      const short = (value) => (value === null ? "none" : String(Number(value.toPrecision(3))));
      meta.append(element("b", "", `reward ${short(row.reward)}`),
        ...Object.entries(row.rewards).map(([name, value]) => element("span", "", `${name} ${short(value)}`)),
        element("span", "", `agent ${row.agent}`),
        element("span", "", `round ${row.round}`), element("span", "", `${row.tokens} tokens`));
      if (row.end) meta.append(element("span", "", row.end));
      box.append(meta, element("pre", "answer", row.completion));
      return box;
    };
    // A prompt with its right answer and its completions, of which the first are open.
    const group = (own) => {
      const box = element("div", "prompt-group", "");
      const head = element("div", "head", "");
      head.append(element("pre", "prompt", own[0].prompt));
      if (own[0].answer) {
        const right = element("div", "right", "right answer ");
        right.append(element("code", "", own[0].answer));
        head.append(right);
      }
      box.append(head, ...own.slice(0, OPEN).map(shown));
      if (own.length > OPEN) {
        const rest = element("button", "unfold", `${own.length - OPEN} more`);
        rest.type = "button";
        rest.addEventListener("click", () => rest.replaceWith(...own.slice(OPEN).map(shown)));
        box.append(rest);
      }
      return box;
    };
    const grouped = (found) => {
      const groups = new Map();
      for (const row of found) {
        const key = JSON.stringify([row.prompt, row.answer]);
        if (groups.has(key)) groups.get(key).push(row);
        else groups.set(key, [row]);
      }
      return [...groups.values()];
    };
    const low = (row) => (row.reward === null ? Infinity : row.reward);
    const high = (row) => (row.reward === null ? -Infinity : row.reward);
    const orders = { best: (a, b) => high(b) - high(a) || 0, worst: (a, b) => low(a) - low(b) || 0 };
    const list_all = () => {
      const words = search.value.toLowerCase();
      let found = rows.filter((row) =>
        (agent.value === "" || String(row.agent) === agent.value) &&
        (!words || row.prompt.toLowerCase().includes(words) ||
          row.answer.toLowerCase().includes(words) ||
          row.completion.toLowerCase().includes(words)));
      if (orders[order.value]) found = [...found].sort(orders[order.value]);
      const groups = grouped(found);
      list.replaceChildren(...groups.slice(0, limit).map(group));
      const all = data.completions.total > rows.length ? ` (of ${data.completions.total} recorded)` : "";
      told.textContent = `${found.length} of ${rows.length}${all}`;
      more.hidden = groups.length <= limit;
    };
    for (const field of [search, agent, order]) {
      field.addEventListener("input", () => {
        limit = SHOWN;
        store("sessionStorage", `evo-grpo-${field.id}`, field.value);
        list_all();
      });
    }
    more.addEventListener("click", () => { limit += SHOWN; list_all(); });
    list_all();
  }

  // While a run goes on, its page is written anew after every round.
  const again = document.getElementById("refresh");
  if (again) {
    again.checked = store("sessionStorage", "evo-grpo-refresh") !== "no";
    again.addEventListener("change", () =>
      store("sessionStorage", "evo-grpo-refresh", again.checked ? "yes" : "no"));
    window.setInterval(() => {
      const typing = document.activeElement && document.activeElement.id === "search";
      if (again.checked && document.visibilityState === "visible" && !typing) location.reload();
    }, data.refresh * 1000);
  }
  root.dataset.ready = "yes";
})();

// A watched page asks every two seconds what is new. Progress changes in place; figures are drawn again; the rest of the
// page is exchanged when what it says has changed, and stays where the reader is, with what they opened, typed and sorted.
"use strict";

const live = {
  seen: null,

  async ask() {
    try {
      const answer = await fetch("status.json", {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.status);
      await this.take(await answer.json());
      this.lost(false);
    } catch (gone) {
      this.lost(true);
    }
    setTimeout(() => this.ask(), 2000);
  },

  async take(state) {
    const before = this.seen || {};
    if (this.seen && state.content !== before.content) await this.exchange();
    else if (this.seen && state.figures !== before.figures) await this.redraw();
    this.seen = state;
    this.progress(state.progress);
  },

  lost(gone) {
    const box = one("#progress");
    box.classList.toggle("lost", gone);
    if (gone) one(".said", box).textContent = "the watcher has stopped; the page stays as it was";
  },

  progress({said, meters, running}) {
    const box = one("#progress");
    one(".said", box).textContent = said;
    for (const [name, meter] of Object.entries(meters)) {
      const place = one(`[data-meter="${name}"]`, box);
      place.classList.toggle("hidden", !meter.of);
      one("i", place).style.width = `${100 * meter.done / Math.max(1, meter.of)}%`;
      one(".numbers", place).textContent = `${count(meter.done)}/${count(meter.of)}${meter.left ? ` · about ${meter.left} left` : ""}`;
    }
    one(".running", box).textContent = running.join("\n");
  },

  async redraw() {
    plots.known = await (await fetch("figures.json", {cache: "no-store"})).json();
    plots.again();
    plots.watch();
  },

  async exchange() {
    const text = await (await fetch("main.html", {cache: "no-store"})).text();
    const held = remember();
    const drawn = Object.fromEntries(all(".plot").filter(place => one(".drawn", place)).map(place => [place.dataset.figure, place]));
    one("main").innerHTML = text;
    for (const place of all(".plot")) if (drawn[place.dataset.figure]) place.replaceWith(drawn[place.dataset.figure]);
    start();
    restore(held);
    await this.redraw();
  },
};

function remember() {
  return {
    scroll: scrollY,
    claims: all(".claim[open], .folded[open]").map(claim => claim.id),
    runs: all('.run .open[aria-expanded="true"]').map(button => button.closest(".run").id),
    verdict: one('.chip[aria-pressed="true"]')?.dataset.verdict ?? "",
    typed: all("input[data-filter]").map(input => [input.id, input.value]),
    sorted: all("table[data-what]").map(table => [table.id, all("thead th", table).findIndex(head => (head.ariaSort ?? "none") !== "none"),
      one('th[aria-sort="descending"]', table) !== null]),
    unfolded: all('[data-unfold][aria-pressed="true"]').map(button => button.id),
    focus: document.activeElement?.id,
    views: all('[data-view][aria-pressed="true"]').map(button => [button.closest(".figure").id, button.dataset.view]),
  };
}

function restore(held) {
  held.claims.forEach(id => { const claim = document.getElementById(id); if (claim) claim.open = true; });
  held.runs.forEach(id => { const run = document.getElementById(id); if (run) openRun(one(".open", run), true); });
  if (held.verdict) showClaims(held.verdict);
  for (const [id, column, down] of held.sorted) if (column >= 0 && document.getElementById(id)) sortBy(document.getElementById(id), column, down);
  held.unfolded.forEach(id => document.getElementById(id)?.click());
  for (const [id, value] of held.typed) {
    const input = document.getElementById(id);
    if (input && value) { input.value = value; filterTable(input); }
  }
  for (const [figure, view] of held.views) {
    all(`[id="${figure}"] [data-view]`).forEach(button => { button.ariaPressed = String(button.dataset.view === view); });
  }
  if (held.focus) document.getElementById(held.focus)?.focus({preventScroll: true});
  scrollTo({top: held.scroll, behavior: "instant"});
}

live.ask();

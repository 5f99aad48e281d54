// Figures are drawn when they come near, in the colours of the theme. The library is parsed with the first of them.
"use strict";

const plots = {
  known: null, // figure id → its Vega specification
  shown: {}, // figure id → Vega's view of it
  views: {}, // figure id → the number of its measure of x
  near: null,

  library() {
    if (!window.vegaEmbed) document.head.append(make("script", {textContent: one("#vega").textContent}));
  },

  signals(place, theme = document.documentElement.dataset.theme) {
    return {width: place.clientWidth, palette: PALETTES[theme], view: this.views[place.dataset.figure] || 0};
  },

  async draw(place, theme) {
    const id = place.dataset.figure, box = place.firstElementChild;
    this.known ||= JSON.parse(one("#data-figures").textContent);
    if (!this.known[id]) return;
    this.library();
    box.className = "drawn";
    const spec = structuredClone(this.known[id]), values = this.signals(place, theme);
    for (const signal of spec.signals) if (signal.name in values) signal.value = values[signal.name];
    const made = await vegaEmbed(box, spec, {mode: "vega", ast: true, renderer: "svg", actions: false, defaultStyle: false, tooltip});
    this.shown[id] = made.view;
    place.style.setProperty("--height", `${made.view.height()}px`);
  },

  // Colours, width and measure change in place.
  update(theme) {
    for (const place of all(".plot")) {
      const view = this.shown[place.dataset.figure];
      if (!view) continue;
      for (const [name, value] of Object.entries(this.signals(place, theme))) view.signal(name, value);
      view.run();
      place.style.setProperty("--height", `${view.height()}px`);
    }
  },

  view(button) {
    const figure = button.closest(".figure"), place = one(".plot", figure);
    this.views[place.dataset.figure] = Number(button.dataset.view);
    all("[data-view]", figure).forEach(other => { other.ariaPressed = String(other === button); });
    this.update();
  },

  watch() {
    this.near = new IntersectionObserver((entries, observer) => {
      for (const entry of entries.filter(entry => entry.isIntersecting)) {
        observer.unobserve(entry.target);
        this.draw(entry.target);
      }
    }, {rootMargin: "500px 0px"});
    all(".plot").filter(place => one(".waiting", place)).forEach(place => this.near.observe(place));
  },
};

// The text of the nearest point; its first line is a title.
function tooltip(handler, event, item, text) {
  const box = one("#tip") || document.body.appendChild(make("div", {id: "tip", role: "tooltip"}));
  box.classList.toggle("hidden", !text);
  if (!text) return;
  const [title, ...rest] = text.split("\n");
  box.replaceChildren(make("b", {textContent: title}), ...rest.map(line => make("div", {textContent: line})));
  const room = document.documentElement.clientWidth - box.offsetWidth - 8;
  box.style.left = `${Math.max(8, Math.min(event.clientX + 14, room))}px`;
  box.style.top = `${event.clientY + 16 + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : event.clientY + 16}px`;
}

document.addEventListener("theme", () => plots.update());
document.addEventListener("click", event => {
  const button = event.target.closest("[data-view]");
  if (button) plots.view(button);
});

// A phone that is turned gets the other layout.
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) { width = innerWidth; plots.update(); }
});

// Paper shows everything, in the light theme.
let closed = [];
addEventListener("beforeprint", () => {
  closed = all(".claim:not([open]), .folded:not([open])");
  closed.forEach(claim => { claim.open = true; });
  document.documentElement.dataset.printed = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  plots.update("light");
  all(".plot").filter(place => one(".waiting", place)).forEach(place => plots.draw(place, "light"));
});
addEventListener("afterprint", () => {
  closed.forEach(claim => { claim.open = false; });
  document.documentElement.dataset.theme = document.documentElement.dataset.printed;
  plots.update();
});

// After the first paint: the text is there before the library is parsed, which happens while the reader reads.
requestAnimationFrame(() => setTimeout(() => {
  plots.watch();
  setTimeout(() => (window.requestIdleCallback || setTimeout)(() => { if (one(".plot")) plots.library(); }), 1500);
}));

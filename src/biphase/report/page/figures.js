// Figures are drawn when they come near, in the colours of the theme. The library is parsed with the first of them.
"use strict";

const plots = {
  known: null, // figure id → what Plotly draws
  views: {}, // figure id → the number of its view
  near: null,

  library() {
    if (!window.Plotly) document.head.append(make("script", {textContent: one("#plotly").textContent}));
  },

  palette(theme = document.documentElement.dataset.theme) { return PALETTES[theme]; },

  draw(place, theme) {
    const id = place.dataset.figure;
    this.known ||= data.read("figures");
    if (!this.known[id]) return;
    this.library();
    const box = place.firstElementChild;
    if (box.matches(".waiting")) {
      box.replaceChildren();
      box.className = "drawn";
    }
    biphaseFigures.show(box, this.known[id], this.palette(theme), this.views[id] || 0);
    place.style.setProperty("--height", `${box._fullLayout.height}px`);
  },

  again(theme) { all(".plot").filter(place => one(".drawn", place)).forEach(place => this.draw(place, theme)); },

  view(button) {
    const figure = button.closest(".figure"), place = one(".plot", figure);
    this.views[place.dataset.figure] = Number(button.dataset.view);
    all("[data-view]", figure).forEach(other => { other.ariaPressed = String(other === button); });
    this.draw(place);
  },

  watch() {
    this.near?.disconnect();
    this.near = new IntersectionObserver((entries, observer) => {
      for (const entry of entries.filter(entry => entry.isIntersecting)) {
        observer.unobserve(entry.target);
        this.draw(entry.target);
      }
    }, {rootMargin: "500px 0px"});
    all(".plot").filter(place => one(".waiting", place)).forEach(place => this.near.observe(place));
  },
};

document.addEventListener("theme", () => plots.again());
document.addEventListener("click", event => {
  const button = event.target.closest("[data-view]");
  if (button) plots.view(button);
});

// A phone that is turned gets the other layout.
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) { width = innerWidth; plots.again(); }
});

// Paper shows everything, in the light theme.
let closed = [];
addEventListener("beforeprint", () => {
  closed = all(".claim:not([open]), .folded:not([open])");
  closed.forEach(claim => { claim.open = true; });
  document.documentElement.dataset.printed = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  all(".plot").forEach(place => plots.draw(place, "light"));
});
addEventListener("afterprint", () => {
  closed.forEach(claim => { claim.open = false; });
  document.documentElement.dataset.theme = document.documentElement.dataset.printed;
  plots.again();
});

// After the first paint: the text is there before the library is parsed, which happens while the reader reads.
requestAnimationFrame(() => setTimeout(() => {
  plots.watch();
  setTimeout(() => (window.requestIdleCallback || setTimeout)(() => { if (one(".plot")) plots.library(); }), 1500);
}));

// Tables that sort and filter; claims by verdict; runs that open.
"use strict";

const one = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const make = (tag, fields = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children);
  return made;
};
const count = number => number.toLocaleString("en-US");

// ---------------------------------------------------------------- sorting and filtering

const units = table => table.hasAttribute("data-grouped") ? [...table.tBodies] : [...table.tBodies[0].rows];
const numeric = text => text !== "" && Number.isFinite(Number(text)) ? Number(text) : null;

// Numbers by value, words as people order them, what is missing at the end whichever way.
function compare(one, other, down) {
  if (one === "" || other === "") return (one === "") - (other === "");
  const [a, b] = [numeric(one), numeric(other)];
  const order = a !== null && b !== null ? a - b : one.localeCompare(other, "en", {numeric: true});
  return down ? -order : order;
}

function sortBy(table, column, down) {
  all("thead th", table).forEach((head, place) => {
    if (head.hasAttribute("aria-sort")) head.ariaSort = place === column ? (down ? "descending" : "ascending") : "none";
  });
  const value = unit => {
    const cell = (unit.rows ? unit.rows[0] : unit).cells[column];
    return column === 0 ? unit.dataset.id : cell.dataset.v ?? cell.textContent.trim();
  };
  const sorted = units(table).map(unit => [value(unit), unit]).sort((a, b) => compare(a[0], b[0], down));
  (table.hasAttribute("data-grouped") ? table : table.tBodies[0]).append(...sorted.map(pair => pair[1]));
}

// The first click shows the highest scores first and names from a to z.
function sortClicked(button) {
  const head = button.closest("th"), table = head.closest("table");
  const column = [...head.parentNode.cells].indexOf(head);
  sortBy(table, column, head.ariaSort === "none" ? column > 0 : head.ariaSort === "ascending");
}

const words = text => text.toLowerCase().split(/\s+/).filter(Boolean);

// Checkpoints on the way are folded until they are asked for, or a filter asks for them.
function fold(table) {
  const button = one(`[data-unfold="${table.id}"]`), typed = one(`[data-filter="${table.id}"]`).value.trim();
  if (button) table.classList.toggle("folding", button.ariaPressed !== "true" && !typed);
}

function filterTable(input) {
  const table = document.getElementById(input.dataset.filter), asked = words(input.value);
  fold(table);
  let shown = 0;
  for (const unit of units(table)) {
    const row = unit.rows ? unit.rows[0] : unit;
    const text = `${unit.dataset.id} ${row.cells[0].textContent} ${row.textContent}`.toLowerCase();
    const hit = asked.every(word => text.includes(word));
    unit.classList.toggle("hidden", !hit);
    shown += hit;
  }
  const of = units(table).length, what = table.dataset.what;
  one(`[data-count="${table.id}"]`).textContent = shown === of ? `${count(of)} ${what}` : `${count(shown)} of ${count(of)} ${what}`;
}

// ---------------------------------------------------------------- claims and runs

function showClaims(verdict) {
  all(".chip").forEach(chip => { chip.ariaPressed = String(chip.dataset.verdict === verdict); });
  all(".claim").forEach(claim => claim.classList.toggle("hidden", verdict !== "" && claim.dataset.verdict !== verdict));
  all(".claims, .folded").forEach(group => group.classList.toggle("hidden", !one(".claim:not(.hidden)", group)));
  if (verdict === "untested") all(".folded").forEach(group => { group.open = true; });
}

function openRun(button, open = button.getAttribute("aria-expanded") !== "true") {
  button.setAttribute("aria-expanded", String(open));
  document.getElementById(button.getAttribute("aria-controls")).classList.toggle("hidden", !open);
}

// A link to a claim opens it.
function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target.matches(".claim")) {
    target.open = true;
    target.closest(".folded")?.setAttribute("open", "");
    target.scrollIntoView();
  }
  if (target.matches(".run")) openRun(one(".open", target), true);
}

// ---------------------------------------------------------------- the bar

function fillBar() {
  one(".bar nav").replaceChildren(...all("main > section").map(section =>
    make("a", {href: `#${section.id}`, textContent: section.dataset.title})));
  const sections = new IntersectionObserver(entries => {
    for (const entry of entries.filter(entry => entry.isIntersecting)) {
      all(".bar nav a").forEach(link => {
        const here = link.hash === `#${entry.target.id}`;
        here ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
      });
    }
  }, {rootMargin: "-45% 0px -50% 0px"});
  all("main > section").forEach(section => sections.observe(section));
}

document.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.matches(".theme")) switchTheme();
  else if (button.matches("thead th[aria-sort] > button") && button.closest("table[data-what]")) sortClicked(button);
  else if (button.matches("[data-unfold]")) {
    button.ariaPressed = String(button.ariaPressed !== "true");
    fold(document.getElementById(button.dataset.unfold));
  }
  else if (button.matches(".chip")) showClaims(button.dataset.verdict);
  else if (button.matches(".run .open")) openRun(button);
});
document.addEventListener("input", event => { if (event.target.dataset.filter) filterTable(event.target); });
addEventListener("hashchange", openTarget);
// Served by `report --watch`, the page reloads itself when it was written again, but not while a claim or a run is open
// or a filter is in use. Without an answer the watch has ended, and the page stays as it is.
let written = null;
async function reloadIfWritten() {
  const answer = await fetch(location.pathname, {method: "HEAD", cache: "no-store"}).catch(() => null);
  const now = answer?.headers.get("Last-Modified") ?? written;
  if (!one("details[open], [aria-expanded=true], input:focus, input:not(:placeholder-shown)")) {
    if (written && now !== written) location.reload();
    written = now;
  }
}
if (["127.0.0.1", "localhost"].includes(location.hostname)) {
  reloadIfWritten();
  setInterval(reloadIfWritten, 10_000);
}
fillBar();
openTarget();

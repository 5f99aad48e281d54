// Before anything is shown: the theme a reader chose, or else the one their system asks for.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("biphase-theme"); } catch (refused) { /* private windows may refuse */ }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => { document.documentElement.dataset.theme = chosen || (dark.matches ? "dark" : "light"); };
  apply();
  dark.addEventListener("change", () => { apply(); document.dispatchEvent(new Event("theme")); });
  window.switchTheme = () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("biphase-theme", chosen); } catch (refused) { /* the switch still works */ }
    apply();
    document.dispatchEvent(new Event("theme"));
  };
})();

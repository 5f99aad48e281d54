"""What a page runs to show figures: a few lines of JavaScript that know the roles, the two layouts and the views.

`biphaseFigures.show(box, figure, palette)` draws, and draws again after the theme, the width or the view has changed;
what a reader has hidden or zoomed stays. The Plotly script must be on the page; nothing else is needed.
"""

from __future__ import annotations

NARROW = 720  # pixels of the box: below it, panels stand below each other

SCRIPT = """
const biphaseFigures = {
  narrow: NARROW,

  paint(figure, palette, narrow, view) {
    const tint = (hex, alpha) => `rgba(${[1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16))},${alpha})`;
    const shown = (figure.views || [])[view];
    const data = figure.data.map((trace, number) => {
      const colour = palette[trace.meta.role], made = {...trace};
      if (shown) made.x = shown.x[number];
      if (narrow && trace.meta.narrow) made.text = trace.meta.narrow;
      if (trace.fill) {
        made.fillcolor = tint(colour, 0.16);
        made.line = {...trace.line, color: "rgba(0,0,0,0)"};
        return made;
      }
      if (trace.line) made.line = {...trace.line, color: colour};
      if (trace.marker || trace.type === "bar") {
        const edge = (trace.marker || {}).line || {width: 0};
        const inside = trace.meta.hollow ? "rgba(0,0,0,0)" : colour;
        made.marker = {...trace.marker, color: inside, line: {...edge, color: colour}};
      }
      if (trace.error_y) made.error_y = {...trace.error_y, color: colour};
      if (trace.textfont) made.textfont = {...trace.textfont, color: palette.text};
      return made;
    });
    const layout = structuredClone(narrow ? figure.narrow : figure.layout);
    if (view) { // uprights are of the first one
      layout.shapes = [];
      layout.annotations = layout.annotations.filter(note => note.name !== "muted");
    }
    layout.font.color = palette.text;
    layout.hoverlabel = {
      ...layout.hoverlabel, bgcolor: palette.background, bordercolor: palette.muted,
      font: {...layout.hoverlabel.font, color: palette.text},
    };
    for (const [name, axis] of Object.entries(layout)) {
      if (!/^[xy]axis/.test(name)) continue;
      axis.gridcolor = axis.linecolor = palette.grid;
      axis.tickfont = {...axis.tickfont, color: palette.muted};
      if (shown && name[0] === "x") {
        Object.assign(axis, structuredClone(shown.axis), {uirevision: shown.name});
      }
    }
    for (const note of layout.annotations) note.font.color = palette[note.name];
    for (const line of layout.shapes) line.line.color = palette[line.name];
    return {data, layout};
  },

  show(box, figure, palette, view = 0) {
    const narrow = box.clientWidth < this.narrow;
    const {data, layout} = this.paint(figure, palette, narrow, view);
    box.style.height = `${layout.height}px`; // else Plotly gives every figure the height of its usual one
    return Plotly.react(box, data, layout, {responsive: true, displayModeBar: false});
  },
};
""".replace("NARROW", str(NARROW))

"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 40rem)");

  function styled(layout) {
    const ink = dark.matches ? "#e6e9ed" : "#1b1f24";
    const rule = dark.matches ? "#3b444e" : "#d9dee4";
    const made = Object.assign({}, layout, {
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: "system-ui, sans-serif", size: 13 },
      margin: Object.assign({ l: narrow.matches ? 48 : 64, r: 12, t: 12, b: 48 }, layout.margin),
      legend: Object.assign({ orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, layout.legend),
      hoverlabel: { bgcolor: dark.matches ? "#262c34" : "#ffffff", font: { color: ink } },
    });
    delete made.width;
    delete made.template;
    for (const key of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name))])) {
      made[key] = Object.assign({ gridcolor: rule, zerolinecolor: rule, linecolor: rule, automargin: true }, layout[key]);
    }
    return made;
  }

  function draw() {
    figures.forEach((figure, at) => {
      const chart = document.getElementById("chart-" + at);
      Plotly.react(chart, figure.data, styled(figure.layout), { displayModeBar: false, responsive: true, scrollZoom: false });
    });
    document.body.dataset.drawn = String(figures.length);
  }

  draw();
  dark.addEventListener("change", draw);
  narrow.addEventListener("change", draw);
})();

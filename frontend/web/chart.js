// A line chart of the last two minutes on a canvas. Knows samples {at (ms), values}, but not where they come from.
// A line's colour is read from the legend, which CSS colours for both themes, so that lines and legend cannot differ.

export const WINDOW_MS = 120_000;
const GAP_MS = 3500; // a line breaks where no sample came for this long, because the page was hidden
const PAD = { left: 46, right: 8, top: 8, bottom: 18 };

// Returns the smallest number that is 1, 2 or 5 times a power of ten and not below `value`.
export function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((limit) => limit >= value * 0.999);
}

export class Chart {
  // `spec`: {title, lines: [name…], write(value) as text, and the end of the value axis: `most`, or at least `least`}
  constructor(spec, parent) {
    this.spec = spec;
    const fresh = document.getElementById("chart").content.cloneNode(true);
    this.canvas = fresh.querySelector("canvas");
    fresh.querySelector("b").textContent = spec.title;
    this.keys = spec.lines.map((name, i) => {
      const key = document.createElement("span");
      key.className = `key series-${i + 1}`;
      fresh.querySelector(".legend").append(key);
      return key;
    });
    parent.append(fresh);
  }

  // `marks`: the times of events, such as the restart of a worker, after which the values are of another process.
  draw(samples, now, marks) {
    const { spec, canvas } = this;
    const latest = samples.at(-1)?.values;
    this.keys.forEach((key, i) => {
      key.textContent = `${spec.lines[i]} ${latest ? spec.write(latest[i]) : "–"}`;
    });
    canvas.setAttribute("aria-label", `${spec.title}, last two minutes: ${this.keys.map((key) => key.textContent).join(", ")}`);
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return; // the charts are folded away
    const sharp = devicePixelRatio || 1;
    canvas.width = width * sharp;
    canvas.height = height * sharp;
    const pen = canvas.getContext("2d");
    pen.scale(sharp, sharp);
    const most = spec.most ?? ceiling(Math.max(spec.least, ...samples.flatMap((sample) => sample.values ?? [])));
    const area = {
      x: (at) => PAD.left + (1 - (now - at) / WINDOW_MS) * (width - PAD.left - PAD.right),
      y: (value) => PAD.top + (1 - value / most) * (height - PAD.top - PAD.bottom),
    };
    this.#axes(pen, area, most, now, getComputedStyle(canvas));
    for (const at of marks) if (now - at < WINDOW_MS) mark(pen, area.x(at), height, getComputedStyle(canvas));
    this.keys.forEach((key, i) => line(pen, area, samples, i, getComputedStyle(key).color));
  }

  #axes(pen, area, most, now, style) {
    pen.font = `11px ${style.fontFamily}`;
    pen.fillStyle = style.color;
    pen.strokeStyle = style.borderTopColor;
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const value of [0, most / 2, most]) {
      const y = Math.round(area.y(value)) + 0.5;
      pen.beginPath();
      pen.moveTo(PAD.left, y);
      pen.lineTo(area.x(now), y);
      pen.stroke();
      pen.fillText(this.spec.write(value), PAD.left - 5, y);
    }
    pen.textBaseline = "alphabetic";
    const bottom = area.y(0) + 14;
    for (const [ago, text, align] of [[WINDOW_MS, "−2 min", "left"], [WINDOW_MS / 2, "−1 min", "center"], [0, "now", "right"]]) {
      pen.textAlign = align;
      pen.fillText(text, area.x(now - ago), bottom);
    }
  }
}

function mark(pen, x, height, style) {
  pen.strokeStyle = style.color;
  pen.setLineDash([3, 3]);
  pen.beginPath();
  pen.moveTo(x, PAD.top);
  pen.lineTo(x, height - PAD.bottom);
  pen.stroke();
  pen.setLineDash([]);
}

function line(pen, area, samples, i, color) {
  pen.strokeStyle = color;
  pen.lineWidth = 1.75;
  pen.lineJoin = "round";
  pen.beginPath();
  let before = -Infinity;
  for (const { at, values } of samples) {
    if (!values) {
      before = -Infinity;
      continue;
    }
    if (at - before > GAP_MS) pen.moveTo(area.x(at), area.y(values[i]));
    else pen.lineTo(area.x(at), area.y(values[i]));
    before = at;
  }
  pen.stroke();
}

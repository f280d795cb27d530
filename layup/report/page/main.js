// The frame: header, pages, theme.

const PAGES = ["lifetimes", "bill", "curve", "streams", "ring"];
const boards = [];

async function readData() {
  const node = $("data"), text = node.textContent;
  if (node.dataset.encoding !== "deflate-base64") return JSON.parse(text);
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function header(report, view) {
  document.title = report.title;
  $("title").textContent = report.title;
  $("subtitle").textContent = report.subtitle;
  const data = view.data, figures = [
    ["peak", bytes(report.peak_bytes), report.peak_bytes === data.peak_bytes ? "" : `training ${bytes(data.peak_bytes)}`],
    ["reserved", bytes(report.reserved_bytes), report.keep_bytes ? `${(100 * report.reserved_bytes / report.keep_bytes).toFixed(1)} % of keep` : ""],
    ["budget", report.memory_bytes ? bytes(report.memory_bytes) : "none", report.memory_bytes && report.memory_bytes < report.reserved_bytes ? "does not fit" : ""],
    ["pinned host", bytes(report.host_bytes), ""],
    ["predicted step", seconds(data.step_ns), report.keep_step_ns ? `${((data.step_ns / report.keep_step_ns - 1) * 100).toFixed(1)} % over keep` : ""],
    ["offloaded", report.offloaded_bytes ? bytes(report.offloaded_bytes) : "nothing", ""],
    ["recomputed", report.recompute_fraction ? percent(report.recompute_fraction, 1) : "nothing", report.recompute_fraction ? "of forward" : ""],
  ];
  if (report.measured_peak_bytes != null) {
    figures.splice(1, 0, ["measured peak", bytes(report.measured_peak_bytes), report.measured_peak_bytes === report.peak_bytes ? "as predicted" : "differs"]);
  }
  $("figures").replaceChildren(...figures.map(([name, value, note]) => el("div", { class: note === "does not fit" || note === "differs" ? "bad" : "" }, el("dt", {}, name), el("dd", {}, value, note ? el("small", {}, " " + note) : ""))));
  $("footer").textContent = report.footer;
}

function openPage(name) {
  for (const page of PAGES) {
    const selected = page === name, tab = $("tab-" + page);
    $(page).hidden = !selected;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
  tip.hide();
  for (const board of boards) board.redraw();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  readPalette();
  for (const board of boards) board.redraw();
}

async function main() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  const report = await readData();
  report.categories = Object.fromEntries(report.roles.map((role, k) => [role, report.role_categories[k]]));
  report.reasons = {};
  report.bill.name.forEach((name, k) => { report.reasons[report.strings[name]] = report.strings[report.bill.reason[k]]; });
  const views = { plan: new View(report.views.plan, report) };
  if (report.views.naive) views.naive = new View(report.views.naive, report);
  header(report, views.plan);
  const lifetimes = new Lifetimes(report, views);
  lifetimes.explain();
  drawWaterfall(report);
  drawResidents(report, views.plan);
  new LayerTable(report);
  const curve = new Curve(report, views.plan);
  const streams = new Streams(report, views.plan);
  new Ring(report);
  boards.push(...[lifetimes, curve, streams].map((page) => page.board).filter(Boolean));
  const tabs = PAGES.map((page) => $("tab-" + page));
  tabs.forEach((tab, k) => {
    tab.addEventListener("click", () => { location.hash = "/" + PAGES[k]; }); // no element has this id: nothing scrolls
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      const next = tabs[(k + step + tabs.length) % tabs.length];
      next.focus(); next.click();
    });
  });
  const here = () => openPage(PAGES.includes(location.hash.slice(2)) ? location.hash.slice(2) : "lifetimes");
  addEventListener("hashchange", here);
  addEventListener("resize", () => { for (const board of boards) board.redraw(); });
  here();
  document.documentElement.dataset.ready = "yes";
}

main();

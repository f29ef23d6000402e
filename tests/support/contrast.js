// Texts whose contrast to what is behind them is below 4.5, or that are transparent.
(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const over = (colour, below) => {
    canvas.fillStyle = `rgb(${below.join(' ')})`;
    canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const light = (rgb) => rgb.map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, j) => sum + [0.2126, 0.7152, 0.0722][j] * x, 0);
  const paper = (element) => (element ? over(getComputedStyle(element).backgroundColor, paper(element.parentElement)) : [255, 255, 255]);
  const opacity = (element) => (element ? +getComputedStyle(element).opacity * opacity(element.parentElement) : 1);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), bad = [];
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || element.closest('script,style,.tip')) continue;
    const below = paper(element), ink = over(getComputedStyle(element).color, below);
    const [a, b] = [light(ink), light(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5 || opacity(element) < 1) bad.push(`${ratio.toFixed(2)} ${element.className} ${text.slice(0, 30)}`);
  }
  return bad;
})()
